//! Floor 1. Linux, safely: mappings, pidfd, inotify, cgroups, processes. Nearly all the unsafe of the agent.
