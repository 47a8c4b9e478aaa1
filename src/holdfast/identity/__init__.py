"""Identity: who may say what, and how the other side knows that it was they.

The account seed is the root. From it come, one per generation: the dispatchers' key that signs
commands, each agent's key that authenticates what it reports, and each agent's key to which its
secrets are sealed. Dispatchers hold the seed. **No agent ever does**: its `AgentCredentials` carry
its own private keys and the dispatchers' public ones, so that a stolen agent can speak for itself
and for nobody else.

Server permissions alone are not enough. A client may name any subject as the reply of a request,
and the server's answer is then delivered there, past all permissions. What must not be forged is
therefore signed: commands by the dispatchers (`CommandSigner`), acks and returns by the agent
(`ReportSigner`).

Not here: the sealing of secrets (`holdfast.settings`), and any I/O but files.
"""

from holdfast.identity.commands import (
    Command,
    CommandRefused,
    CommandSigner,
    CommandVerifier,
    Refusal,
)
from holdfast.identity.credentials import AgentCredentials, Credentials, load_credentials
from holdfast.identity.reports import ReportSigner, ReportVerifier
from holdfast.identity.requests import Requester, RequestGuard, RequestRefused, RequestSigner
from holdfast.identity.seed import AccountSeed

__all__ = [
    "AccountSeed",
    "AgentCredentials",
    "Command",
    "CommandRefused",
    "CommandSigner",
    "CommandVerifier",
    "Credentials",
    "Refusal",
    "ReportSigner",
    "ReportVerifier",
    "RequestGuard",
    "RequestRefused",
    "RequestSigner",
    "Requester",
    "load_credentials",
]
