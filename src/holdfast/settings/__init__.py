"""Settings: a tree of files that reaches the agents it is meant for, and secrets that reach no one
else.

What an agent's login must be allowed, and nothing more (`<id>` is its own):

    subscribe  hf.kv.hf_settings.revision          a new revision was published
    subscribe  hf.kv.hf_secrets.<id>               its secrets were sealed anew (no content)
    subscribe  hf.node.<id>.settings               questions of operators
    publish    $JS.API.DIRECT.GET.KV_hf_settings.$KV.hf_settings.>
    publish    $JS.API.DIRECT.GET.KV_hf_secrets.$KV.hf_secrets.<id>
    publish    $KV.hf_applied.<id>                 what it made of the revision

A publisher writes `$KV.hf_settings.>` and `$KV.hf_secrets.>`, reads both and `hf_applied`.
"""
