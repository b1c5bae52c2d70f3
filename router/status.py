"""What `GET /cluster` shows."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import orjson

from router.metrics import pages
from router.service import Service
from router.sessions import Session
from router.siblings import Answer


def cluster_status(service: Service) -> dict[str, Any]:
    """The cluster as this router sees it, as a JSON document.

    `workers[].load.pages` counts the pages of a worker's pool by owner state, as of its last report;
    `workers[].routers` has what each router makes of the worker.
    """
    workers = service.workers
    return {
        "cluster": service.settings.cluster,
        "model": service.checkpoint.name,
        "ready": workers.ready,
        "max_model_len": workers.max_model_len or None,
        "redis": {"ok": not workers.redis_error, "error": workers.redis_error or None},
        "workers": [
            _worker(session, workers.router_id, workers.index.size(session.id)) for session in workers.sessions
        ],
        "routers": [asdict(member) for member in workers.routers],
    }


def with_siblings(own: dict[str, Any], router_id: str, answers: Sequence[Answer]) -> dict[str, Any]:
    """The status of all routers: `own`, with what the others answered to the same question."""
    documents = {answer.router_id: orjson.loads(answer.body) for answer in answers if answer.ok}
    documents[router_id] = own
    errors = {answer.router_id: answer.error for answer in answers if not answer.ok}
    workers = {worker["id"]: worker for worker in own["workers"]}
    for document in documents.values():
        for worker in document["workers"]:
            workers.setdefault(worker["id"], worker)["routers"].update(worker["routers"])
    routers = []
    for member in own["routers"]:
        seen = documents.get(member["id"])
        routers.append(member | {"ready": bool(seen and seen["ready"]), "error": errors.get(member["id"])})
    return own | {"workers": [workers[worker_id] for worker_id in sorted(workers)], "routers": routers}


def _worker(session: Session, router_id: str, cached_blocks: int) -> dict[str, Any]:
    hello = session.hello
    seen = {
        "state": session.state,
        "reason": session.reason or None,
        "cached_blocks": cached_blocks,
    }
    view = session.view
    sequences, late = (view.sequences, view.candidate.late) if view is not None else (0, 1.0)
    described = {
        "id": session.id,
        "role": session.role,
        "address": session.member.address,
        "session": session.member.session,
        "host": session.member.host,
        "pid": session.member.pid,
        "incarnation": session.member.incarnation,
        **seen,
        "routers": {router_id: {**seen, "sequences": sequences, "late": late}},
    }
    if hello is None:
        return described | {"info": None, "load": None}
    load = session.load
    info = {
        "fingerprint": hello.fingerprint.hex(),
        "epoch": hello.epoch,
        "dtype": hello.dtype,
        "device": hello.device,
        "transport": hello.transport,
        "transport_reason": hello.transport_reason or None,
        "block_size": hello.block_size,
        "num_pages": hello.num_pages,
        "page_bytes": hello.page_bytes,
        "max_model_len": hello.max_model_len,
        "vocab_size": hello.vocab_size,
        "token_budget": view.candidate.token_budget if view is not None else hello.token_budget,
        "colocate": hello.colocate or None,
    }
    report = {
        "running": load.running,
        "waiting": load.waiting,
        "waiting_tokens": load.waiting_tokens,
        "decodes": load.decodes,
        "prefill_ms": load.prefill_ms,
        "late_ms": load.late_ms,
        "step_ms": load.step_ms,
        "slower": load.slower,
        "pages": pages(load),
        "preemptions": load.preemptions,
        "prefill_tokens": load.prefill_tokens,
        "decode_tokens": load.decode_tokens,
        "cached_tokens": load.cached_tokens,
        "fills": dict(load.fills),
        "fill_failures": dict(load.fill_failures),
        "host": {
            "pages": load.host_pages,
            "kept": load.host_kept_pages,
            "blocks": dict(load.host_blocks),
        },
    }
    return described | {"info": info, "load": report}
