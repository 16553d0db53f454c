//! Fault rules: which calls they match, when they take effect, and what they do.
#![allow(clippy::unwrap_used)] // A test that cannot continue has failed.

use std::time::{Duration, Instant};

use silicon::description::GpuDescription;
use silicon::fault::{Kill, Mutation, Rule, RuleFile};
use silicon::machine::ProcessKind;
use silicon::{Call, Decision, Description, Host, Return};
use tempfile::TempDir;

const DESTROY: &str = "nvmlGpuInstanceDestroy";

fn host() -> (TempDir, Host) {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::create(dir.path(), &Description::of(vec![GpuDescription::new("a100-80", 2)])).unwrap();
    (dir, host)
}

fn write(host: &Host, rules: &str) {
    let draft = host.dir().join("draft");
    std::fs::write(&draft, rules).unwrap();
    std::fs::rename(draft, host.dir().join("faults.toml")).unwrap();
}

fn rcs(host: &Host, call: &Call<'_>, count: usize) -> Vec<Option<u32>> {
    (0..count).map(|_| host.before(call).unwrap().rc.map(Return::code)).collect()
}

#[test]
fn rule_passes_some_calls_fails_some_and_ends() {
    let (_dir, host) = host();
    let call = Call::on(DESTROY, 1).gpu_instance(3);
    assert_eq!(rcs(&host, &call, 2), [None, None], "no rules, no faults");
    write(&host, "[[fault]]\nfunction = \"nvmlGpuInstanceDestroy\"\ngpu = 1\nrc = \"IN_USE\"\nafter = 1\ntimes = 2\n");
    assert_eq!(rcs(&host, &Call::on(DESTROY, 0), 3), [None; 3], "another GPU");
    assert_eq!(rcs(&host, &Call::new("nvmlInit_v2"), 1), [None], "another function");
    assert_eq!(rcs(&host, &call, 5), [None, Some(19), Some(19), None, None]);
    let (_, counter) = host.faults().unwrap()[0].clone();
    assert_eq!((counter.seen, counter.fired), (5, 2));
    // A second opener of the host uses the same counters.
    let other = Host::open(host.dir()).unwrap();
    assert_eq!(rcs(&other, &call, 1), [None]);
    assert_eq!(host.faults().unwrap()[0].1.seen, 6);
    // A changed rule starts with new counters.
    write(&host, "[[fault]]\nfunction = \"nvmlGpuInstanceDestroy\"\nrc = 19\ntimes = 1\n");
    assert_eq!(rcs(&other, &call, 2), [Some(19), None]);
}

#[test]
fn names_match_with_their_versions_and_by_pattern() {
    let matches = |rule: &str, function: &str| Rule::new(rule).rc(Return::Unknown).matches_name(function);
    assert!(matches("nvmlInit", "nvmlInit_v2"));
    assert!(matches("nvmlInit_v2", "nvmlInit_v2"));
    assert!(!matches("nvmlInit", "nvmlInitWithFlags"));
    assert!(!matches("nvmlInit_v2", "nvmlInit"));
    assert!(!matches("nvmlDeviceCreateGpuInstance", "nvmlDeviceCreateGpuInstanceWithPlacement"));
    assert!(matches("nvmlDeviceCreateGpuInstance*", "nvmlDeviceCreateGpuInstanceWithPlacement"));
    assert!(matches("nvml*Destroy", "nvmlComputeInstanceDestroy"));
    assert!(matches("*", "nvmlDeviceGetCount_v2"));
    assert!(!matches("nvml*Destroy", "nvmlDeviceGetCount_v2"));
}

#[test]
fn probability_is_repeatable_by_seed() {
    let fired = |seed: u64| {
        let (_dir, host) = host();
        write(&host, &format!("[[fault]]\nfunction=\"{DESTROY}\"\nrc=19\nprobability=0.25\nseed={seed}\n"));
        rcs(&host, &Call::on(DESTROY, 0), 400)
    };
    let (one, two) = (fired(1), fired(2));
    let count = one.iter().filter(|rc| rc.is_some()).count();
    println!("{count} of 400 calls failed at a probability of 0.25");
    assert!((60..140).contains(&count));
    assert_eq!(one, fired(1));
    assert_ne!(one, two);
}

#[test]
fn lost_gpu_stays_lost_until_reboot() {
    let (_dir, host) = host();
    host.add_fault(Rule { mutate: Some(Mutation::Lose), xid: Some(79), times: Some(1), ..Rule::new(DESTROY) }).unwrap();
    assert_eq!(rcs(&host, &Call::on(DESTROY, 1), 2), [Some(15), None], "the rule is done, the GPU is not back");
    let machine = host.read().unwrap();
    assert_eq!(machine.gpu(1).err(), Some(Return::GpuIsLost));
    assert!(machine.gpu(0).is_ok());
    assert_eq!(machine.events().next(0, |_| true).map(|event| (event.gpu, event.data)), Some((1, 79)));
    let boot = std::fs::read_to_string(host.dir().join("boot_id")).unwrap();
    host.reboot().unwrap();
    assert!(host.read().unwrap().gpu(1).is_ok());
    assert_ne!(std::fs::read_to_string(host.dir().join("boot_id")).unwrap(), boot);
}

#[test]
fn leaked_handle_blocks_until_process_ends() {
    let (_dir, host) = host();
    let gi = host.update(|machine| machine.create_gpu_instance(0, 19, None)).unwrap();
    host.add_fault(Rule { mutate: Some(Mutation::Leak), ..Rule::new("nvmlDeviceGetGpuInstanceById") }).unwrap();
    let call = Call::on("nvmlDeviceGetGpuInstanceById", 0).gpu_instance(gi.id);
    assert_eq!(host.before(&call).unwrap(), Decision::default(), "the call itself works");
    let machine = host.read().unwrap();
    assert!(ProcessKind::ALL.iter().all(|kind| machine.gpus()[0].listed(*kind).next().is_none()));
    assert_eq!(host.update(|machine| machine.destroy_gpu_instance(gi)), Err(Return::InUse));
    host.update(|machine| Ok::<_, Return>(machine.detach(std::process::id(), None))).unwrap();
    host.update(|machine| machine.destroy_gpu_instance(gi)).unwrap();
}

#[test]
fn decisions_carry_activation_status_and_staleness() {
    let (_dir, host) = host();
    write(
        &host,
        "[[fault]]\nfunction=\"nvmlDeviceSetMigMode\"\nactivation_status=16\n\
         [[fault]]\nfunction=\"nvmlDeviceGetGpuInstances\"\nmutate=\"stale\"\n",
    );
    let decision = host.before(&Call::on("nvmlDeviceSetMigMode", 0)).unwrap();
    assert_eq!((decision.rc, decision.activation_status), (None, Some(Return::ResetRequired)));
    assert!(host.before(&Call::on("nvmlDeviceGetGpuInstances", 0)).unwrap().stale);
    host.update(|machine| machine.set_mig_mode_pending(0, false)).unwrap();
    assert_eq!((host.read().unwrap().gpus()[0].mig, host.read().unwrap().gpus()[0].mig_pending), (true, false));
}

#[test]
fn unprivileged_rules_do_not_apply_to_root() {
    let rule = Rule { unprivileged: true, ..Rule::new("nvmlDeviceSetMigMode") }.rc(Return::NoPermission);
    let call = Call::on("nvmlDeviceSetMigMode", 0);
    assert!(rule.matches(&call, false));
    assert!(!rule.matches(&call, true));
}

#[test]
fn hang_lasts_until_rule_removal_without_a_lock() {
    let (_dir, host) = host();
    host.add_fault(Rule { hang: true, ..Rule::new("nvmlDeviceSetMigMode") }).unwrap();
    host.add_fault(Rule::new(DESTROY).rc(Return::InUse)).unwrap();
    std::thread::scope(|scope| {
        let hung = scope.spawn(|| host.before(&Call::on("nvmlDeviceSetMigMode", 0)));
        while host.faults().unwrap()[0].1.fired == 0 {
            std::thread::yield_now();
        }
        // While the call hangs, other processes can call the driver and can take the lock.
        for _ in 0..20 {
            let gi = host.update(|machine| machine.create_gpu_instance(0, 19, None)).unwrap();
            host.update(|machine| machine.destroy_gpu_instance(gi)).unwrap();
        }
        assert!(!hung.is_finished());
        // The call hangs until its own rule is removed. Removing another rule does not end the
        // hang.
        assert_eq!(host.clear_faults(Some(1)).unwrap(), 1);
        assert_eq!(host.faults().unwrap().len(), 1);
        assert!(!hung.is_finished());
        host.clear_faults(Some(0)).unwrap();
        assert_eq!(hung.join().unwrap().unwrap(), Decision::default());
    });
}

#[test]
fn delay_rule_delays_a_call() {
    let (_dir, host) = host();
    host.add_fault(Rule { delay_ms: 40, ..Rule::new(DESTROY) }).unwrap();
    let started = Instant::now();
    assert_eq!(rcs(&host, &Call::on(DESTROY, 0), 1), [None]);
    assert!(started.elapsed() >= Duration::from_millis(40));
}

#[test]
fn invalid_rules_are_refused_with_place_and_fix() {
    let error = |text: &str| RuleFile::parse(text).unwrap_err().to_string();
    let tried = [
        ("[[fault]]\nfunctoin = \"nvmlInit\"\n", "line 2, column 1: unknown key `functoin`; did you mean `function`?"),
        ("[[fault]]\nfunction = \"nvmlInit\"\nrc = \"BUSY\"\n", "`BUSY` is no NVML return code"),
        ("[[fault]]\nfunction = \"nvmlInit\"\nrc = 31\n", "`31` is no NVML return code"),
        ("[[fault]]\nfunction = \"nvmlInit\"\nkill = \"durnig\"\n", "line 3, column 8: unknown value `durnig`"),
        ("\n[[fault]]\nfunction = \"nvmlInit\"\n", "line 2, column 1: the rule for nvmlInit does nothing"),
        ("[[fault]]\nfunction = \"cudaMalloc\"\nrc = 1\n", "names no function of NVML"),
        ("[[fault]]\nfunction = \"compute-policy\"\nrc = 1\n", "names no function of NVML"),
        ("[[fault]]\nfunction = \"compute-p*-get\"\nrc = 1\n", "names no function of NVML"),
        ("[[fault]]\nfunction = \"nvmlInit\"\nrc = 9\nprobability = 2.0\n", "`probability` is a share from 0 to 1"),
        ("[[fault]]\nfunction = \"nvmlInit\"\nactivation_status = 19\n", "nvmlInit has no activation status"),
        ("[[fault]]\nrc = 1\n", "missing field `function`"),
        ("[fault]\nrc = 1\n", "line 1"),
        ("fault = 3", "line 1, column 9"),
    ];
    for (text, expected) in tried {
        let error = error(text);
        assert!(error.starts_with("faults.toml: ") && error.contains(expected), "{text}\n{error}");
    }
    println!("{} wrong files refused", tried.len());
    // If the fault file is invalid, every call fails. Otherwise a typing error would mean "no
    // faults".
    let (_dir, host) = host();
    write(&host, "[[fault]]\n");
    let refused = host.before(&Call::new("nvmlInit_v2")).unwrap_err();
    assert_eq!(Return::from(refused), Return::Unknown);
    host.clear_faults(None).unwrap();
    assert_eq!(rcs(&host, &Call::new("nvmlInit_v2"), 1), [None]);
}

#[test]
fn rules_read_back_as_written() {
    let (_dir, host) = host();
    let rules = [
        Rule { gpu: Some(1), gpu_instance: Some(7), kill: Some(Kill::After), times: Some(1), ..Rule::new(DESTROY) },
        Rule { unprivileged: true, ..Rule::new("nvmlDeviceSetMigMode") }.rc(Return::NoPermission),
        Rule { probability: Some(0.5), seed: 9, delay_ms: 3, ..Rule::new("*") },
        Rule::new(silicon::fault::GPU_RESET).rc(Return::InUse),
        Rule { after: 1, ..Rule::new(silicon::fault::COMPUTE_POLICY_SET).rc(Return::NotSupported) },
        Rule::new("compute-policy-*").rc(Return::Unknown),
    ];
    for rule in &rules {
        host.add_fault(rule.clone()).unwrap();
    }
    let read: Vec<Rule> = host.faults().unwrap().into_iter().map(|(rule, _)| rule).collect();
    assert_eq!(read, rules);
    assert!(host.add_fault(Rule::new("nvmlInit")).is_err(), "it does nothing");
    assert!(host.clear_faults(Some(9)).unwrap_err().to_string().contains("there are 6"));
    assert_eq!(host.clear_faults(None).unwrap(), 6);
    assert_eq!(host.faults().unwrap(), []);
}
