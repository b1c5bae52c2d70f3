"""The models that a router serves, by their names in the API."""

from collections.abc import Mapping, Sequence

from router.api.completions import CompletionService
from router.api.tenants import Tenant
from router.errors import invalid


class Models:
    """The models of a router, each with its own tokenizer, template, workers, index and settings.

    Args:
        services: One for each model, at least one.

    Attributes:
        services: See above.
        first: The first one.
    """

    def __init__(self, services: Sequence[CompletionService]) -> None:
        self.services = services
        self.first = services[0]
        self._by_name = {name: service for service in services for name in service.names}

    @property
    def ready(self) -> bool:
        """True if a worker of some model takes requests, and the cached blocks of all workers that were listed when
        this router started are known."""
        workers = [service.workers for service in self.services]
        return all(one.settled for one in workers) and any(one.ready for one in workers)

    def find(self, name: str | None, tenant: Tenant) -> CompletionService:
        """Returns the model of this name or alias; without one, the only model that the tenant may use.

        Raises:
            ApiError: There is none that the tenant may use (404), or several and no name (400).
        """
        service = self._by_name.get(name) if name is not None else None
        if service is not None and tenant.may_use(service.names):
            return service
        allowed = self.allowed(tenant)
        listed = " and ".join(f"'{one.name}'" for one in allowed) or "no model for this API key"
        if name is None:
            if len(allowed) == 1:
                return allowed[0]
            message = f"'model' is needed: this server has {listed}."
            raise invalid("model", message, code="missing_required_parameter")
        message = f"The model '{name}' does not exist. This server has {listed}."
        raise invalid("model", message, code="model_not_found", status=404)

    def allowed(self, tenant: Tenant) -> list[CompletionService]:
        """Returns the models that the tenant may use."""
        return [service for service in self.services if tenant.may_use(service.names)]

    def sampling_defaults(self, name: object) -> Mapping[str, float]:
        """Returns the sampling fields whose defaults differ from OpenAI's for a model, by what a body has as `model`;
        none if there is no such model."""
        service = self._by_name.get(name) if isinstance(name, str) else None
        return service.sampling_defaults if service is not None else {}
