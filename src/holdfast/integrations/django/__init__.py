"""Holdfast in a Django project: automatic discovery of jobs, `manage.py holdfast`, and an outbox.

    INSTALLED_APPS = [..., "holdfast.integrations.django"]
    HOLDFAST_APP = "shop.jobs_app:app"

The module `jobs` of every installed app is imported when Django is ready, so that jobs are defined
there: `@app.job`. `manage.py holdfast worker` is `holdfast worker` with that app; database
connections that have expired are closed before and after each run. `outbox` sends runs if, and only
if, a transaction commits.
"""
