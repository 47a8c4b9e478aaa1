"""Settings: delivers a tree of files to the agents it targets, and secrets only to entitled agents.

The permissions an agent's login needs, and nothing more (`<id>` is the agent's id):

    subscribe  hf.kv.hf_settings.revision          a new revision was published
    subscribe  hf.kv.hf_secrets.<id>               its secrets were resealed (no content)
    subscribe  hf.node.<id>.settings               operators' queries
    publish    $JS.API.DIRECT.GET.KV_hf_settings.$KV.hf_settings.>
    publish    $JS.API.DIRECT.GET.KV_hf_secrets.$KV.hf_secrets.<id>
    publish    $KV.hf_applied.<id>                 its report on the revision

A publisher writes `$KV.hf_settings.>` and `$KV.hf_secrets.>`, and reads both and `hf_applied`.
"""
