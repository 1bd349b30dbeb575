"""Who a request belongs to, and what they may use: keys, limits, groups that share KV."""

from kvhearth.router.tenants.tenant import Tenant
from kvhearth.router.tenants.tenants import Tenants

__all__ = ["Tenant", "Tenants"]
