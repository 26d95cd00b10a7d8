"""Prints pip's settings as uv's environment variables, in the syntax of sh: uv does not read pip.conf.

pip config list | python scripts/uv_settings.py
"""

import ast
import shlex
import sys

NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
# Settings without an equal in uv's environment variables: pip installs.
WITHOUT_UV = {"no-index", "no-binary", "only-binary", "pre", "cache-dir", "no-cache-dir"}
SECTIONS = "global", "install", ":env:"  # pip's order: a later one wins

settings = {}
for line in sys.stdin:
    key, _, value = line.strip().partition("=")
    section, _, name = key.rpartition(".")
    if section in SECTIONS and name in WITHOUT_UV:
        print("uv=")
    if section in SECTIONS and name in NAMES:
        values = ast.literal_eval(value).split()
        if name.endswith("timeout"):
            values = [str(int(float(values[0])))]
        settings[SECTIONS.index(section), NAMES[name]] = (",".join if name == "find-links" else " ".join)(values)
for (_, name), value in sorted(settings.items(), key=lambda item: item[0][0]):
    print(f"export {name}={shlex.quote(value)}")
# pip takes the best version of all indexes; by default, uv uses only the first index with the package.
print("export UV_INDEX_STRATEGY=unsafe-best-match")
print("export UV_SYSTEM_CERTS=1")
