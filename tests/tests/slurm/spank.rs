//! The SPANK plugin, which adds the option `--gpush=SPEC`. It is compiled with Slurm's headers.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use gpush_api::MpsState;
use gpush_tests::{
    host::program,
    mps::reaches,
    slurm::{ALICE, Setup, Site},
};

use super::{HOST, MPS};

/// Builds the plugin. If the headers or the compiler are missing, reports that and returns `None`.
fn plugin(directory: &Path) -> Option<PathBuf> {
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace").join("packaging/slurm/spank_gpush.c");
    let built = directory.join("spank_gpush.so");
    if !Path::new("/usr/include/slurm/spank.h").is_file() {
        println!("SKIPPED SPANK plugin: Slurm's headers are not installed (Debian's package libslurm-dev)");
        return None;
    }
    let mut gcc = Command::new("gcc");
    gcc.args(["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&built).arg(source);
    let Ok(output) = gcc.output() else {
        println!("SKIPPED SPANK plugin: gcc is not installed");
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(built)
}

fn with_plugin(setup: Setup, built: &Path) -> Setup {
    let line = format!("optional {} gpushctl={}\n", built.display(), program("gpushctl").display());
    std::fs::write(setup.dir().join("plugstack.conf"), line).expect("a file");
    let path = setup.dir().join("plugstack.conf");
    setup.line(&format!("PlugStackConfig={}", path.display()))
}

#[test]
fn spank_option_is_checked_at_submit_and_overrides_comment() {
    let scratch = tempfile::tempdir().expect("a directory");
    let Some(built) = plugin(scratch.path()) else { return };
    std::fs::set_permissions(scratch.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("a mode");
    let Some(site) = Site::start(HOST, MPS, |setup, _, _| with_plugin(setup, &built)) else { return };
    reaches(&site.agent, "0", MpsState::Ready);
    let arguments = ["--gres=gpu:1", "--gpush=mps=25,memory=2G", "--comment=gpush:mps=75"];
    let ended = site.cluster.run_job(ALICE, &arguments, "env");
    assert_eq!(ended.state, "COMPLETED", "{}", ended.output);
    assert_eq!(ended.variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), Some("25"), "{}", ended.output);
    for (spec, says) in [("mps=250", "250"), ("colour=red", "colour"), ("", "needs a request"), ("mps=25\n", "control")]
    {
        let error = site.cluster.try_sbatch(ALICE, &["--gres=gpu:1", &format!("--gpush={spec}")], "env").unwrap_err();
        assert!(error.contains("gpush: ") && error.contains(says), "{spec:?}: {error}");
    }
    // The plugin must not pass the option to a shell.
    let evil = format!("--gpush=$(touch {}/out/evil)", site.cluster.dir().display());
    assert!(site.cluster.try_sbatch(ALICE, &[&evil], "env").is_err());
    assert!(!site.cluster.dir().join("out/evil").exists());
    let output = site.cluster.command_of(ALICE, "srun").args(["--gres=gpu:1", "--gpush=mps=40", "env"]).output();
    let output = String::from_utf8_lossy(&output.expect("srun can be started").stdout).into_owned();
    assert!(output.contains("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40\n"), "{output}");
    site.cluster.wait_until_idle();
    site.assert_clean();
}
