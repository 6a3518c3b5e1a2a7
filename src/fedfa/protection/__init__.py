"""What stands between the clients' contributions and the aggregate: robust rules, attacks, privacy.

Each stage is a :class:`fedfa.learning.component.Protection` that overrides ``protect`` (on a client, after every other
component has contributed) or ``combine`` (on the server, before any server step). The simulator, Ray and Flower run the
same components, and an algorithm does not know of them. Without protection no component is added.
"""
