"""The wheel has one package, `skipstone`, with ours inside, so that it cannot replace other packages of their names."""

from setuptools import find_packages, setup

INSIDE = "skipstone._packages"
OURS = ["node*", "protocol*", "swarm*", "lab*"]

setup(
    packages=["skipstone", *(f"{INSIDE}.{name}" for name in find_packages(include=OURS))],
    package_dir={INSIDE: "."},
    package_data={
        "skipstone": ["py.typed"],
        f"{INSIDE}.protocol.generated": ["*.pyi"],
        f"{INSIDE}.node.web": ["page/*"],
        f"{INSIDE}.lab": ["*/*.toml"],
    },
)
