"""The file for ms-swift's `--external_plugins`: registers the callback `swiftcruise`, and defines nothing itself.

ms-swift imports it as `_swift_external_<hash>`, a name that a `spawn`ed loader worker could not resolve; so all
classes live in the installed package. ms-swift also puts this file's folder first on `sys.path`, which is why it
has a folder to itself.
"""

from swift.callbacks import callbacks_map

from swiftcruise.runtime.hook import (  # pyright: ignore[reportMissingImports]
    CruiseCallback,
    print_refusals_as_one_line,
)

callbacks_map["swiftcruise"] = CruiseCallback
print_refusals_as_one_line()
