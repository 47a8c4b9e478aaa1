"""Identity: keys, logins and permissions, and proof of who sent a message.

The account seed is the root. From it come, one per generation: the dispatchers' key that signs
commands, each agent's key that authenticates its reports, and each agent's key that its secrets are
sealed to. Dispatchers hold the seed. **Agents never do**: `AgentCredentials` carry the agent's
private keys and the dispatchers' public ones, so a stolen agent can impersonate only itself.

Server permissions alone are not enough: a client may name any subject as the reply of a request,
and the server delivers its response there regardless of permissions. Whatever must not be forged is
therefore signed: commands by dispatchers (`CommandSigner`), acks and returns by agents
(`ReportSigner`).

Not here: sealing secrets (`holdfast.settings`), and any I/O except files.
"""
