"""Resolve the model and machine files of a plan from any working directory."""

from __future__ import annotations

import os.path
from dataclasses import replace
from pathlib import Path

from devplace.cli.imported import is_imported
from devplace.errors import PlanError
from devplace.machine import looks_like_file
from devplace.plan import Plan


def model_file(model: str) -> str:
    """The file that a model is taken from; empty for a built-in one."""
    if is_imported(model):
        return model
    if ":" in model or model.endswith(".py"):
        return model.rpartition(":")[0] or model
    return ""


def with_folder(plan: Plan, path: Path) -> Plan:
    """The plan as it is written to `path`: where it names files by relative paths, with the way
    from there to the folder in which they count, which is the present one."""
    names = [model_file(plan.request["model"]), plan.request["machine"]]
    if not any(os.path.isfile(name) and not os.path.isabs(name) for name in names):
        return plan
    folder = os.path.relpath(os.path.realpath("."), os.path.realpath(path.parent))
    return replace(plan, request={**plan.request, "folder": folder})


class PlanFiles:
    """Finds the files that a plan names.

    Relative paths count from the folder that the plan was made in, which it holds as the way from
    its own. Where a file is not there, the present folder is looked into too. Plans that do not say
    where they were made are looked up in the present folder, then in their own.

    Args:
        path: Where the plan was read from.
        folder: What it says of the folder it was made in; None if nothing.
    """

    def __init__(self, path: Path, folder: str | None) -> None:
        self._is_known = folder is not None
        self._base = os.path.join(os.path.realpath(path.parent), folder or "")

    def model(self, model: str) -> str:
        """The model, with its file as it is found from here.

        Raises:
            PlanError: There is no such file; says where it was looked for.
        """
        name = model_file(model)
        if not name:
            return model
        return self._find(name, "model", "plan again where it is now") + model[len(name) :]

    def machine(self, machine: str) -> str:
        """The machine, with its file as it is found from here.

        Raises:
            PlanError: There is no such file; says where it was looked for.
        """
        if machine == "detect":
            return machine
        if not looks_like_file(machine) and self._found(machine) is None:
            return machine
        return self._find(machine, "machine", "give one with --machine")

    def _find(self, name: str, kind: str, remedy: str) -> str:
        found = self._found(name)
        if found is None:
            raise PlanError(
                f"The plan was made with the {kind} file {name!r}, which is not found: there is no "
                f"{' and no '.join(self._places(name))}. Put it there, or {remedy}."
            )
        is_here = os.path.isfile(name) and os.path.samefile(found, name)
        return name if is_here else found

    def _found(self, name: str) -> str | None:
        return next((place for place in self._places(name) if os.path.isfile(place)), None)

    def _places(self, name: str) -> list[str]:
        """Where the file may be, the likeliest first."""
        made_in, here = os.path.normpath(os.path.join(self._base, name)), os.path.abspath(name)
        places = [made_in, here] if self._is_known else [here, made_in]
        return list(dict.fromkeys(places))
