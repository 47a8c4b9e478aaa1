"""Manifests as plain values, one module for each part of a deployment.

Every function takes the project and returns a list of resources, in the order in which they are
applied. What all pods share, hardening above all, is in `pods`.
"""
