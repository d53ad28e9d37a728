"""The manifest of a run whose router is fitted to documents on this machine.

It stands alone because it needs text and the fit, of which neither knows the other.
"""

from __future__ import annotations

from typing import Final

from node.data.documents import is_held_out
from node.data.feed import open_text
from node.experts.fitting import fit_router
from node.experts.router import Router, router_digest
from protocol.manifest.manifest import DEFAULT_PREFIX, Manifest, manifest_from_table
from swarm.vocabulary.errors import ConfigError

FITTED_TO: Final = 4096
"""Documents, at most."""


def with_router(manifest: Manifest, source: str) -> tuple[Manifest, Router]:
    """Fits a router to the documents of a source, none of them held out; returns the manifest that names it, too.

    Raises:
        ConfigError: the source is not here, or a router cannot be fitted to it.
        ManifestError: it is none, or the run has no experts.
    """
    table = manifest.model_dump()
    of_source = {"source": source, "files": None, "revision": None, "dealt_by": "documents"}
    text = manifest_from_table(table | {"data": table["data"] | of_source})
    if not manifest.stages.has_experts:
        raise ConfigError("--route-from is of no use in a run without experts", hint="Say how many with --experts.")
    seed, held_out = manifest.seed, manifest.data.held_out
    opened = open_text(text)
    documents = list(opened.openings(lambda name: not is_held_out(seed, name, held_out), FITTED_TO, DEFAULT_PREFIX))
    router = fit_router(documents, manifest.stages.experts_of_each, DEFAULT_PREFIX, seed).router
    routing = {"router": router_digest(router.to_bytes()), "prefix": DEFAULT_PREFIX}
    return manifest_from_table(table | {"routing": routing}), router
