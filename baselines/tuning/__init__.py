"""Tuning of policies on simulated trainings: experiments that find a loop's gains, and a search over options.

Only tuning needs the lab; a tuned policy is deployed without it.
"""
