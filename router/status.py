"""What `GET /cluster` shows."""

from dataclasses import asdict
from typing import Any

from router.metrics import pages
from router.service import Service
from router.sessions import Session


def cluster_status(service: Service) -> dict[str, Any]:
    """The cluster as this router sees it, as a JSON document.

    `workers[].load.pages` counts the pages of a worker's pool by owner state, as of its last report.
    """
    workers = service.workers
    return {
        "cluster": service.settings.cluster,
        "model": service.checkpoint.name,
        "ready": workers.ready,
        "max_model_len": workers.max_model_len or None,
        "redis": {"ok": not workers.redis_error, "error": workers.redis_error or None},
        "workers": [_worker(session, workers.index.size(session.id)) for session in workers.sessions],
        "routers": [asdict(member) for member in workers.routers],
    }


def _worker(session: Session, cached_blocks: int) -> dict[str, Any]:
    hello = session.hello
    described = {
        "id": session.id,
        "role": session.role,
        "address": session.member.address,
        "host": session.member.host,
        "pid": session.member.pid,
        "incarnation": session.member.incarnation,
        "state": session.state,
        "reason": session.reason or None,
        "sequences_of_this_router": session.view.sequences if session.view is not None else 0,
        "cached_blocks": cached_blocks,
    }
    if hello is None:
        return described | {"info": None, "load": None}
    load = session.load
    info = {
        "fingerprint": hello.fingerprint.hex(),
        "epoch": hello.epoch,
        "dtype": hello.dtype,
        "transport": hello.transport,
        "block_size": hello.block_size,
        "num_pages": hello.num_pages,
        "page_bytes": hello.page_bytes,
        "max_model_len": hello.max_model_len,
        "vocab_size": hello.vocab_size,
        "token_budget": hello.token_budget,
        "colocate": hello.colocate or None,
    }
    report = {
        "running": load.running,
        "waiting": load.waiting,
        "waiting_tokens": load.waiting_tokens,
        "decodes": load.decodes,
        "prefill_ms": load.prefill_ms,
        "step_ms": load.step_ms,
        "pages": pages(load),
        "preemptions": load.preemptions,
        "prefill_tokens": load.prefill_tokens,
        "decode_tokens": load.decode_tokens,
        "cached_tokens": load.cached_tokens,
        "fills": dict(load.fills),
        "fill_failures": dict(load.fill_failures),
    }
    return described | {"info": info, "load": report}
