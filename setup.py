"""Lists the packages: every folder below labkit/, and data/ as labkit/data.

pyproject.toml says everything else. It cannot say this: `packages.find` does not add a package that
lies outside the tree it searches, and a list by hand would go stale with the next new room.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["labkit", "labkit.*"]), "labkit.data"],
    package_dir={"labkit.data": "data"},
    package_data={"labkit.data": ["**/*"], "labkit": ["py.typed", "**/*.cpp", "**/*.sh"]},
)
