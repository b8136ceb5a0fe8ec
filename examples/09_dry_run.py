"""Peak memory of a real layout without a GPU: the engine's own step on tensors without data. Needs the train extra."""

from meshwright import api

if __name__ == "__main__":  # ranks are traced in processes of their own
    result = api.dryrun("qwen3_600m_sft_config", gpus="2xH100")
    print(f"fits: {result.fits}; {len(result.ranks)} distinct ranks traced in {result.wall_s:.0f} s")
