//! Output of the simulated `nvidia-smi compute-policy`. The tests parse it as gpushd does.

#![allow(clippy::unwrap_used)] // A test fails by a panic.

use gpush_api::{GpuIndex, TimesliceLevel};
use gpush_core::compute_policy::{LevelReport, level_of, levels};
use gpush_tests::host::Host;

/// Returns the exit code and all output of `nvidia-smi compute-policy ARGS…`.
fn run(host: &Host, arguments: &str) -> (i32, String) {
    let mut command = host.command(host.dir().join("bin/nvidia-smi"));
    let output = command.arg("compute-policy").args(arguments.split_whitespace()).output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    (output.status.code().unwrap(), text)
}

#[test]
fn levels_are_read_back_as_set() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\nmig = false\ncount = 12\n[[gpu]]\nmodel = \"h100-80-sxm\"\n");
    for (gpu, level) in TimesliceLevel::ALL.into_iter().enumerate() {
        let (code, text) = run(&host, &format!("--set-timeslice {} -i {}", level.number(), gpu + 8));
        assert_eq!(code, 0, "{text}");
    }
    let (code, text) = run(&host, "--list");
    assert_eq!(code, 3, "the last one is in MIG mode");
    let reported = levels(&text);
    assert_eq!(reported.len(), 13, "{text}");
    let of = |gpu: u32| level_of(&reported, GpuIndex(gpu), &"".into(), "").unwrap();
    for gpu in 0..8 {
        assert_eq!(of(gpu), &LevelReport::Level(TimesliceLevel::Default));
    }
    for (gpu, level) in (8..).zip(TimesliceLevel::ALL) {
        assert_eq!(of(gpu), &LevelReport::Level(level));
    }
    assert_eq!(of(12), &LevelReport::Unsupported);
    host.fault("compute-policy-list --gpu 3 --rc GPU_IS_LOST");
    let (code, text) = run(&host, "--list -i 3,8");
    assert_eq!((code, levels(&text).len()), (15, 2), "{text}");
    assert_eq!(
        level_of(&levels(&text), GpuIndex(3), &"".into(), ""),
        Some(&LevelReport::Failed("GPU is lost".to_owned()))
    );
}
