"""Programs that tests run in environments with packages of their own are not collected."""

collect_ignore_glob = ["environments/*", "frameworks/*"]
