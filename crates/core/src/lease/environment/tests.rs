use std::process::Command;

use proptest::prelude::*;

use super::*;

const GPU: &str = "GPU-5d1b03a2-0000-4000-8000-00000000000a";
const MIG: &str = "MIG-5d1b03a2-0000-4000-8000-00000000000b";

fn mps() -> Environment {
    Environment {
        lease: LeaseId(17),
        devices: vec![DeviceUuid::new(GPU).unwrap()],
        mps: Some(MpsClient {
            pipe_directory: PipeDirectory::new("/run/gpush-mps/g5d1b03a2").unwrap(),
            percentage: "12.5".parse().unwrap(),
            memory_limit: MemoryLimit::of_mib(8192),
            priority: Priority::BelowNormal,
        }),
        notice: Some(NoticeFile::new("/run/gpush/notices/L17").unwrap()),
    }
}

fn mig() -> Environment {
    Environment { lease: LeaseId(18), devices: vec![DeviceUuid::new(MIG).unwrap(); 2], mps: None, notice: None }
}

#[test]
fn mps_lease_has_all_variables_in_every_format() {
    let variables = [
        ("CUDA_VISIBLE_DEVICES", GPU),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        ("CUDA_MPS_PIPE_DIRECTORY", "/run/gpush-mps/g5d1b03a2"),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "12.5"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=8192M"),
        ("CUDA_MPS_CLIENT_PRIORITY", "1"),
        ("GPUSH_NOTICE", "/run/gpush/notices/L17"),
        ("GPUSH_LEASE", "L17"),
    ];
    let found = mps().variables();
    assert_eq!(found.iter().map(|(name, value)| (*name, value.as_str())).collect::<Vec<_>>(), variables);
    let shell: String = variables.iter().map(|(name, value)| format!("export {name}='{value}'\n")).collect();
    assert_eq!(mps().text(Format::Shell), shell);
    let slurm: String = variables.iter().map(|(name, value)| format!("export {name}={value}\n")).collect();
    assert_eq!(mps().text(Format::Slurm), slurm);
    let json: serde_json::Value = serde_json::from_str(&mps().text(Format::Json)).unwrap();
    assert_eq!(json["GPUSH_LEASE"], "L17");
    let docker = mps().text(Format::Docker);
    let volume = "--volume\n/run/gpush-mps/g5d1b03a2:/run/gpush-mps/g5d1b03a2\n--ipc\nhost\n";
    assert!(docker.starts_with(&format!("--gpus\n\"device={GPU}\"\n--env\n")) && docker.ends_with(volume), "{docker}");
    assert!(!docker.contains("CUDA_VISIBLE_DEVICES"));
}

#[test]
fn mig_lease_unsets_the_variables_of_a_former_mps_lease() {
    let text = mig().text(Format::Slurm);
    assert!(text.contains(&format!("export CUDA_VISIBLE_DEVICES={MIG},{MIG}\n")), "{text}");
    for name in ["CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_CLIENT_PRIORITY"] {
        assert!(text.contains(&format!("unset {name}\n")) && !text.contains(&format!("export {name}")), "{text}");
    }
    let named: usize = mig().variables().len() + mig().unset().len();
    assert_eq!(named, ALL.len());
}

#[test]
fn shell_evaluates_to_the_variables() {
    let script = format!("{}env", mps().text(Format::Shell));
    let output =
        Command::new("/bin/sh").arg("-c").arg(script).env_clear().env("PATH", "/usr/bin:/bin").output().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    for (name, value) in mps().variables() {
        assert!(printed.lines().any(|line| line == format!("{name}={value}")), "{printed}");
    }
    assert!(!Command::new("/bin/sh").arg("-c").arg(SHELL_FAILURE).status().unwrap().success());
}

fn owned(environment: &Environment) -> Vec<(String, String)> {
    environment.variables().into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[test]
fn environment_reads_back_from_its_variables() {
    for environment in [mps(), mig()] {
        let mut variables = owned(&environment);
        variables.reverse();
        assert_eq!(Environment::from_variables(&variables), Ok(environment));
    }
}

#[test]
fn foreign_or_wrong_variable_is_named() {
    for (name, value) in [
        ("LD_PRELOAD", "/tmp/x.so"),
        ("CUDA_VISIBLE_DEVICES", "all"),
        ("CUDA_MPS_PIPE_DIRECTORY", "/run/$(id)"),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "101"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "1=8G"),
        ("CUDA_MPS_CLIENT_PRIORITY", "7"),
        ("GPUSH_LEASE", "17"),
    ] {
        let mut variables = owned(&mps());
        variables.retain(|(one, _)| one != name);
        variables.push((name.to_owned(), value.to_owned()));
        let error = Environment::from_variables(&variables).unwrap_err();
        assert_eq!(error.name, name, "{value}");
    }
    assert_eq!(Environment::from_variables(&[]).unwrap_err().name, "CUDA_VISIBLE_DEVICES");
}

#[test]
fn fish_and_csh_formats_use_their_own_commands() {
    let fish = mig().text(Format::Fish);
    assert!(fish.contains("set -e CUDA_MPS_PIPE_DIRECTORY\n"), "{fish}");
    assert!(fish.ends_with("set -gx GPUSH_LEASE 'L18'\n"), "{fish}");
    let csh = mig().text(Format::Csh);
    assert!(csh.starts_with("unsetenv CUDA_MPS_") && csh.ends_with("setenv GPUSH_LEASE 'L18';\n"), "{csh}");
}

/// Fault: with drivers before R470, a lease of a MIG device ended as soon as it was granted.
#[test]
fn old_name_of_mig_device_is_accepted() {
    let uuid = "MIG-GPU-5d1b03a2-0000-4000-8000-00000000000a/1/0";
    assert_eq!(DeviceUuid::new(uuid).unwrap().as_str(), uuid);
    for text in [uuid.trim_end_matches("/0"), &format!("{uuid}/0"), &uuid.replace("/1/", "/x/"), &format!("{uuid};id")]
    {
        assert_eq!(DeviceUuid::new(text), Err(NotAValue::Uuid), "{text}");
    }
}

#[test]
fn hostile_value_is_refused() {
    for text in
        ["", "GPU-", "0", "all", "GPU-$(id)", "MIG-GPU-5d1b03a2/1/0", "GPU-5d1b03a2-0000-4000-8000-00000000000a;id"]
    {
        assert_eq!(DeviceUuid::new(text), Err(NotAValue::Uuid), "{text}");
    }
    let (longest, longer) = (format!("/{}", "a".repeat(86)), format!("/{}", "a".repeat(87)));
    assert!(PipeDirectory::new(&longest).is_ok());
    for path in ["", "run", "/run/../etc", "/run/a b", "/run/'", "/run/$(id)", "/run/\n", longer.as_str()] {
        assert_eq!(PipeDirectory::new(path), Err(NotAValue::PipeDirectory), "{path}");
        assert_eq!(NoticeFile::new(path).is_ok(), path == longer, "{path}");
    }
}

proptest! {
    /// For any input, the accepted values contain only plain characters, so no format has to escape
    /// them.
    #[test]
    fn values_never_need_escaping(uuid in "(GPU-|MIG-)?.{0,40}", path in "/?.{0,90}", lease in any::<u64>()) {
        let devices: Vec<DeviceUuid> = DeviceUuid::new(&uuid).into_iter().chain(DeviceUuid::new(GPU)).collect();
        let client = mps().mps.unwrap();
        let mps = PipeDirectory::new(&path).ok().map(|pipe_directory| MpsClient { pipe_directory, ..client });
        let notice = NoticeFile::new(&path).ok();
        let environment = Environment { lease: LeaseId(lease), devices, mps, notice };
        for (_, value) in environment.variables() {
            prop_assert!(value.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./=,".contains(&b)), "{}", value);
        }
    }
}
