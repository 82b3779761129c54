"""A contract for import-linter: no module imports itself, however many modules lie between.

Its own contract of acyclic siblings compares packages with packages and modules with modules. This one sees every
module by itself, the ``__init__`` of a package too. Imports under ``TYPE_CHECKING`` and inside functions count.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output

__all__ = ["AcyclicModules"]


class AcyclicModules(Contract):
    """Broken by a circle of imports between any modules of the root package."""

    type_name = "acyclic_modules"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """See Contract."""
        imports = {module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)}
        try:
            TopologicalSorter(imports).prepare()
        except CycleError as error:
            return ContractCheck(kept=False, metadata={"circle": list(reversed(error.args[1]))})
        return ContractCheck(kept=True)

    def render_broken_contract(self, check: ContractCheck) -> None:
        """See Contract."""
        output.print_error("A circle of imports:", bold=True)
        for importer in check.metadata["circle"]:
            output.print_error(f"    {importer}", bold=False)
