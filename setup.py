"""Lists the packages: every folder below labkit/, data/ as labkit/data, and the course.

pyproject.toml says everything else. It cannot say this: `packages.find` does not add a package that
lies outside the tree it searches, and a list by hand would go stale with the next new room.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[
        *find_namespace_packages(include=["labkit", "labkit.*"]),
        *find_namespace_packages("notebooks", include=["labkit_course", "labkit_course.*"]),
        "labkit.data",
    ],
    package_dir={"labkit.data": "data", "labkit_course": "notebooks/labkit_course"},
    package_data={"labkit.data": ["**/*"], "labkit": ["py.typed", "**/*.cpp"]},
    exclude_package_data={"labkit.data": ["*.py"]},
)
