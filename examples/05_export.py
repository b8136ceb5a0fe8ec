"""Write a recipe as the config and command of other frameworks; what they cannot express is listed."""

from meshwright import api

for framework in ("megatron-lm", "torchtitan"):
    written = api.export("llama3_8b_pretrain_config", framework, gpus="8xH100").written
    print(f"# {framework}: {' '.join(written.program.argv)}")
    for name in written.files:
        print(f"#   writes {name}")
    for lost in written.unmapped:
        print(f"#   not expressible: {lost.field} = {lost.value}")
