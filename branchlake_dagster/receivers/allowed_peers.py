"""The networks that may send to a receiver. This is not authentication: UDP addresses can be forged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from branchlake_dagster.errors import ConfigurationError


@dataclass(frozen=True)
class AllowedPeers:
    """The networks from which messages are accepted. Without networks all addresses are accepted."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def from_cidr(cls, cidrs: Iterable[str]) -> AllowedPeers:
        """Parse CIDR notation, such as 10.1.0.0/16 or 2001:db8::/32. Raises ConfigurationError."""
        parsed_networks = []
        for cidr in cidrs:
            try:
                parsed_networks.append(ip_network(cidr))
            except ValueError as error:
                raise ConfigurationError(
                    f"{cidr} is not a network in CIDR notation: {error}.",
                    hint="Write --allow 10.1.0.0/16, or --allow 10.1.2.3 for one address.",
                ) from error
        return cls(tuple(parsed_networks))

    def permits(self, host: str) -> bool:
        """Return whether a numeric address may send."""
        if not self.networks:
            return True
        address = ip_address(host.partition("%")[0])
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped  # sockets for both IP versions use this form
        return any(address in network for network in self.networks)


ALL_PEERS = AllowedPeers()
"""Accepts all addresses."""
