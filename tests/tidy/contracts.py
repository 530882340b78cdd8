"""One contract type of our own for import-linter.

`lint-imports` loads this by name from `[tool.importlinter]` in pyproject.toml.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from grimp import ImportGraph
from importlinter import ContractCheck
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.domain.imports import ModuleExpression


class ForbiddenWherePresent(ForbiddenContract):
    """The `forbidden` contract, for source modules of which some are not written yet.

    import-linter's own refuses a source module that does not exist. This one leaves such a module
    out, and holds it from the commit on that adds it. Everything else is inherited: imports made
    through other modules of ours count as well.
    """

    type_name = "forbidden_where_present"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        # At run time a contract's field holds the parsed values; its declared type is the parser.
        named = cast("Iterable[ModuleExpression]", self.source_modules)
        present = {
            source
            for source in named
            if source.has_wildcard_expression() or source.expression in graph.modules
        }
        vars(self)["source_modules"] = present
        return super().check(graph, verbose)
