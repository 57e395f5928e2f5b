"""What stands on the robot's side, or in a program that calls a server: ``robojax.client`` and ``robojax.robot``."""
