"""The GPU of this machine, in the words in which an artefact records what it was compiled for."""

import torch


def found() -> dict[str, str] | None:
    """The GPU that PyTorch would use; None where there is none."""
    return described(torch.device("cuda")) if torch.cuda.is_available() else None


def described(device: torch.device) -> dict[str, str]:
    """name, capability and cuda: see slipway.artefact.same_gpu."""
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "name": torch.cuda.get_device_name(device),
        "capability": f"{major}.{minor}",
        "cuda": str(torch.version.cuda),
    }
