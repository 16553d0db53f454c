use std::fmt::Write as _;

use gpush_api::{
    Actor, ApiError, Code, ComputeInstance, GpuInstance, Memory, MemoryLimit, MpsComputeMode, MpsSettings, Override,
    Placement, TargetUuid,
};
use proptest::prelude::*;

use super::*;
use crate::{layout::Layout, preset};

mod named;

fn config(text: &str) -> Config {
    Config::parse(text, "config.toml").unwrap_or_else(|e| panic!("{e}"))
}

/// Returns a host whose GPUs have MIG mode off.
fn whole_host(preset: &str) -> Vec<Gpu> {
    let mut gpus = preset::gpus(preset).unwrap();
    for mig in gpus.iter_mut().filter_map(|gpu| gpu.mig.as_mut()) {
        mig.set_mode(false, false);
    }
    gpus
}

/// Adds a GPU instance to a GPU. `slots` contains its compute instances, by profile and slot.
fn put(gpu: &mut Gpu, profile: &str, start: u8, slots: &[(&str, u8)]) {
    let index = gpu.index;
    let mig = gpu.mig.as_mut().unwrap();
    let id = u32::try_from(mig.instances.len()).unwrap();
    let known = mig.profiles.iter().find(|known| known.name == profile).unwrap();
    let compute = slots.iter().enumerate().map(|(n, (name, slot))| ComputeInstance {
        id: u32::try_from(n).unwrap(),
        profile_id: 0,
        profile: (*name).to_owned(),
        placement: Some(Placement { start: *slot, size: 1 }),
        uuid: Some(format!("MIG-{:02x}{start:02x}{slot:04x}-0000-0000-0000-{profile}", index.0).into()),
        processes: Vec::new(),
    });
    let instance = GpuInstance {
        id,
        profile_id: known.id,
        profile: profile.to_owned(),
        placement: Placement { start, size: 1 },
        memory: None,
        compute: compute.collect(),
        processes: Vec::new(),
    };
    mig.instances.push(instance);
}

fn words_of(targets: &[SharingTarget]) -> Vec<String> {
    targets.iter().map(SharingTarget::label).collect()
}

fn uuids(targets: &[SharingTarget]) -> BTreeSet<TargetUuid> {
    targets.iter().map(|target| target.uuid.clone()).collect()
}

#[test]
fn shared_double_memory_entry_means_its_own_profile() {
    let mut gpus = preset::gpus("dgx-h100").unwrap();
    gpus.truncate(1);
    put(&mut gpus[0], "1g.20gb", 0, &[("1c.1g.20gb", 0)]);
    put(&mut gpus[0], "1g.20gb", 2, &[("1g.20gb", 0)]);
    let shared = |layout: &str| -> Vec<String> {
        let layout = Layout::parse(layout).unwrap();
        let shared = devices::shared(&layout, gpus[0].mig.as_ref().unwrap(), &devices::DeviceUses::default());
        shared.iter().map(devices::SharedDevice::display_name).collect()
    };
    assert_eq!(shared("1g.20gb:mps, 1c.1g.20gb"), ["1g.20gb@2"]);
    assert_eq!(shared("1c.1g.20gb:mps, 1g.20gb"), ["1c.1g.20gb@0/0"]);
    assert_eq!(shared("1c.1g.20gb:mps, 1g.20gb:mps"), ["1c.1g.20gb@0/0", "1g.20gb@2"]);
}

#[test]
fn mps_rule_shares_whole_gpus() {
    let config = config("[[gpu]]\nmatch = [\"0-1\"]\nmode = \"mps\"\nmps = { percentage = 25 }\n");
    let gpus = whole_host("dgx-a100");
    let found = decide(&config, &gpus, &BTreeSet::new());
    assert_eq!(words_of(&found.targets), ["GPU 0", "GPU 1"]);
    let target = &found.targets[0];
    assert!(
        target.full_gpu && target.device.is_none() && target.uuid == gpus[0].uuid && target.gpu_uuid == target.uuid
    );
    assert_eq!((&target.policy, target.memory_mib), (&config.rules[0].mps_policy(), Some(gpus[0].memory.total_mib)));
    assert!(found.findings.is_empty() && found.unseen.is_empty());
    assert!(targets(&Config::default(), &gpus, &uuids(&found.targets)).is_empty());
}

#[test]
fn whole_gpu_that_cannot_be_shared_is_reported() {
    let config = config("[[gpu]]\nmatch = [\"all\"]\nmode = \"mps\"\nmps = { memory = \"90G\" }\n");
    let mut gpus = whole_host("dgx-a100");
    let mig = |gpu: &mut Gpu, enabled, pending| {
        let mig = gpu.mig.as_mut().unwrap();
        mig.set_mode(enabled, pending);
    };
    mig(&mut gpus[0], true, true);
    mig(&mut gpus[1], false, true);
    gpus[2].architecture = Architecture::Legacy;
    gpus[3].state = GpuState::Unknown;
    gpus[4].state = GpuState::Lost;
    gpus[5].stale = true;
    let shared_before: BTreeSet<TargetUuid> = gpus.iter().map(|gpu| gpu.uuid.clone().into()).collect();
    let mut shown = String::new();
    for (what, shared_before) in [("nothing was shared", &BTreeSet::new()), ("all were shared", &shared_before)] {
        let found = decide(&config, &gpus, shared_before);
        let _ = writeln!(shown, "# {what}: {}", words_of(&found.targets).join("; "));
        for finding in found.findings {
            let _ = writeln!(shown, "{finding}");
        }
    }
    let _ = writeln!(shown, "# by its parts alone");
    for finding in unfit_settings(&config, &gpus[..3]) {
        let _ = writeln!(shown, "{finding}");
    }
    insta::assert_snapshot!(shown);
}

#[test]
fn entries_share_existing_devices() {
    let layout = ["3g.40gb@4:mps", "1c.3g.40gb@0:mps", "1c.3g.40gb@0*2"];
    let config = config(&format!("[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = {layout:?}\n"));
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    // The device does not exist yet, so there is no target and no problem.
    assert_eq!(decide(&config, &gpus, &BTreeSet::new()), Sharing::default());
    put(&mut gpus[0], "3g.40gb", 4, &[("3g.40gb", 0)]);
    put(&mut gpus[0], "3g.40gb", 0, &[("1c.3g.40gb", 0), ("1c.3g.40gb", 1), ("1c.3g.40gb", 2)]);
    let found = targets(&config, &gpus, &BTreeSet::new());
    assert_eq!(words_of(&found), ["MIG device 0:1c.3g.40gb@0/0", "MIG device 0:3g.40gb@4"]);
    let shared_before = BTreeSet::from([gpus[0].mig.as_ref().unwrap().instances[1].compute[2].uuid.clone().unwrap()]);
    let found = targets(&config, &gpus, &shared_before);
    assert_eq!(words_of(&found), ["MIG device 0:1c.3g.40gb@0/2", "MIG device 0:3g.40gb@4"]);
    // With MIG, no compute mode is set, and the number of clients is proportional to the size of
    // the device.
    let policies: Vec<_> = found.iter().map(|target| (target.policy.compute_mode, target.policy.max_clients)).collect();
    assert_eq!(policies, [(MpsComputeMode::Keep, 6), (MpsComputeMode::Keep, 20)]);
    assert!(found.iter().all(|target| !target.full_gpu && target.gpu_uuid == gpus[0].uuid));
    gpus[0].mig.as_mut().unwrap().enabled = false;
    assert!(targets(&config, &gpus, &shared_before).is_empty());
}

#[test]
fn shared_devices_stay_among_equal_ones() {
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    for start in [0, 2, 4] {
        put(&mut gpus[0], "2g.20gb", start, &[("2g.20gb", 0)]);
    }
    let shares = |layout: &str, shared_before: &[u8]| {
        let config = config(&format!("[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = \"{layout}\"\n"));
        let uuid = |start: &u8| gpus[0].mig.as_ref().unwrap().instances[usize::from(start / 2)].compute[0].uuid.clone();
        let shared_before: BTreeSet<TargetUuid> = shared_before.iter().filter_map(uuid).collect();
        targets(&config, &gpus, &shared_before)
            .into_iter()
            .map(|target| target.device.unwrap())
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert_eq!(shares("2g.20gb:mps,2g.20gb*2", &[]), "2g.20gb@0");
    assert_eq!(shares("2g.20gb:mps,2g.20gb*2", &[4]), "2g.20gb@4");
    assert_eq!(shares("2g.20gb*2:mps,2g.20gb", &[4]), "2g.20gb@0 2g.20gb@4");
    // An entry with a placement has priority over a device that is already shared.
    assert_eq!(shares("2g.20gb@2:mps,2g.20gb*2", &[4]), "2g.20gb@2");
    assert_eq!(shares("2g.20gb@0,2g.20gb:mps", &[0]), "2g.20gb@2");
    assert_eq!(shares("2g.20gb*3:mps", &[2]), "2g.20gb@0 2g.20gb@2 2g.20gb@4");
    assert_eq!(shares("2g.20gb*3", &[2]), "");
    assert_eq!(shares("1g.10gb:mps,3g.40gb:mps,2c.2g.20gb:mps", &[]), "2g.20gb@0");
}

#[test]
fn override_replaces_the_rules_sharing() {
    let config =
        config("[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = \"2g.20gb:mps\"\nmps = { percentage = 50 }\n");
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    put(&mut gpus[0], "2g.20gb", 0, &[("2g.20gb", 0)]);
    put(&mut gpus[0], "3g.40gb", 4, &[("3g.40gb", 0)]);
    assert_eq!(words_of(&targets(&config, &gpus, &BTreeSet::new())), ["MIG device 0:2g.20gb@0"]);
    let overridden = |layout: &str| Override {
        gpu_uuid: gpus[0].uuid.clone(),
        gpu: None,
        rule: None,
        layout: vec![layout.to_owned()],
        by: Actor { uid: 0, user: None, pid: None },
        reason: String::new(),
        created_at: jiff::Timestamp::UNIX_EPOCH,
        expires_at: None,
        generation: 1,
    };
    let (shared, unknown) = (overridden("3g.40gb:mps"), overridden("3g.40gb:else"));
    gpus[0].overridden = Some(shared);
    let found = targets(&config, &gpus, &BTreeSet::new());
    assert_eq!(words_of(&found), ["MIG device 0:3g.40gb@4"]);
    assert_eq!(found[0].policy.settings.percentage.tenths(), 500);
    // The desired layout is unknown, so existing sharing does not change and no device is added.
    gpus[0].overridden = Some(unknown);
    assert_eq!(targets(&config, &gpus, &uuids(&found)), found);
    assert!(targets(&config, &gpus, &BTreeSet::new()).is_empty());
}

#[test]
fn failed_reading_keeps_sharing() {
    let config = config("[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = \"2g.20gb*2:mps\"\n");
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    gpus.truncate(1);
    put(&mut gpus[0], "2g.20gb", 0, &[("2g.20gb", 0)]);
    let before = targets(&config, &gpus, &BTreeSet::new());
    put(&mut gpus[0], "2g.20gb", 2, &[("2g.20gb", 0)]);
    for state in [GpuState::Unknown, GpuState::Changing, GpuState::Held, GpuState::Degraded, GpuState::Maintenance] {
        gpus[0].state = state;
        let found = decide(&config, &gpus, &uuids(&before));
        assert_eq!(found.targets, before, "{state:?}");
        assert!(
            found.findings.len() == 1 && found.findings[0].to_string().starts_with("MIG device 0:2g.20gb@2: "),
            "{found:?}"
        );
    }
    gpus[0].state = GpuState::Lost;
    assert!(targets(&config, &gpus, &uuids(&before)).is_empty());
    gpus[0].state = GpuState::Unknown;
    gpus[0].mig = None;
    let found = decide(&config, &gpus, &uuids(&before));
    assert_eq!((found.targets.len(), found.unseen), (0, BTreeSet::from([gpus[0].uuid.clone()])));
}

#[test]
fn memory_limit_above_the_memory_is_reported() {
    let limit = |mib| MpsSettings { memory_limit_mib: MemoryLimit::of_mib(mib), ..MpsSettings::default() };
    assert!(check_memory_limit(&limit(81_920), 81_920, "GPU 0").is_ok());
    assert!(check_memory_limit(&MpsSettings::default(), 1, "GPU 0").is_ok());
    assert!(check_memory_limit(&limit(90 << 10), 0, "GPU 0").is_ok(), "what is not known is no less");
    let ApiError { code, message, hint, .. } = check_memory_limit(&limit(90 << 10), 81_920, "GPU 0").unwrap_err();
    assert_eq!((code, message.as_str()), (Code::BadRequest, "memory limit 90G is more than the 80 GiB that GPU 0 has"));
    assert_eq!(hint.unwrap(), "use at most 81920M, or leave the limit out");
    assert_eq!(
        check_memory_limit(&limit(1537), 1536, "GPU 0").unwrap_err().message,
        "memory limit 1537M is more than the 1.5 GiB that GPU 0 has"
    );

    let config =
        config("[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = \"2g.20gb:mps\"\nmps = { memory = \"30G\" }\n");
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    gpus.truncate(1);
    put(&mut gpus[0], "2g.20gb", 0, &[("2g.20gb", 0)]);
    let memory = Memory { total_mib: 20_096, used_mib: 0 };
    gpus[0].mig.as_mut().unwrap().instances[0].memory = Some(memory);
    let found = decide(&config, &gpus, &BTreeSet::new());
    assert_eq!((found.targets.len(), found.targets[0].memory_mib), (1, Some(20_096)));
    let shown: Vec<String> = found.findings.iter().map(Finding::to_string).collect();
    assert_eq!(shown, ["MIG device 0:2g.20gb@0: memory limit 30G is more than the 19.6 GiB that the device has"]);
    assert!(
        crate::desired::findings(&config, Some(crate::desired::KnownHost { gpus: &gpus, driver: None }))[0]
            .to_string()
            .contains("that MIG device 0:2g.20gb has")
    );
}

#[test]
fn client_limit_is_proportional_to_the_device() {
    for (wanted, slices, of, most) in
        [(48, 1, 7, 6), (48, 7, 7, 48), (60, 1, 7, 8), (4, 1, 7, 4), (1, 1, 7, 1), (48, 2, 4, 24)]
    {
        assert_eq!(max_device_clients(wanted, slices, of), most, "{wanted} {slices}/{of}");
    }
    assert_eq!(max_device_clients(48, 0, 0), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_device_has_one_daemon_and_none_moves(
        entries in prop::collection::vec((1u8..=3, any::<bool>()), 1..=4),
        fixed in prop::sample::subsequence(vec![0u8, 1, 2, 3, 4, 5, 6], 0..=3),
        stand in prop::collection::vec(any::<bool>(), 7),
        shared_before in prop::collection::vec(any::<bool>(), 7),
    ) {
        let mut texts: Vec<String> = entries
            .iter()
            .map(|(count, shared)| format!("1g.10gb*{count}{}", if *shared { ":mps" } else { "" }))
            .collect();
        texts.extend(fixed.iter().map(|start| format!("1g.10gb@{start}:mps")));
        let config = config(&format!("[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = {texts:?}\n"));
        let mut gpus = preset::gpus("dgx-a100").unwrap();
        gpus.truncate(1);
        let mut before = BTreeSet::new();
        for start in 0..7u8 {
            if stand[usize::from(start)] {
                put(&mut gpus[0], "1g.10gb", start, &[("1g.10gb", 0)]);
                if shared_before[usize::from(start)] {
                    let uuid = gpus[0].mig.as_ref().unwrap().instances.last().unwrap().compute[0].uuid.clone();
                    before.extend(uuid);
                }
            }
        }
        let found = targets(&config, &gpus, &before);
        let now = uuids(&found);
        prop_assert_eq!(now.len(), found.len(), "two daemons on one device");
        // The result contains all requested devices that exist, including those with a placement.
        let anywhere: usize = entries.iter().filter(|(_, shared)| *shared).map(|(count, _)| usize::from(*count)).sum();
        let there = |start: &&u8| stand[usize::from(**start)];
        let placed = fixed.iter().filter(there).count();
        let standing = stand.iter().filter(|stands| **stands).count();
        prop_assert_eq!(found.len(), placed + anywhere.min(standing - placed));
        for start in fixed.iter().filter(there) {
            let words = Some(format!("1g.10gb@{start}"));
            prop_assert!(found.iter().any(|target| target.device == words));
        }
        // A shared device may be replaced only by a device with an explicit placement.
        let gone = before.difference(&now).count();
        let new = found.iter().filter(|target| !before.contains(&target.uuid));
        let new = new.filter(|target| !fixed.iter().any(|start| target.device == Some(format!("1g.10gb@{start}"))));
        prop_assert!(gone == 0 || new.count() == 0, "{:?}, before {:?}", found, before);
        // A second call with the result of the first call gives the same result.
        prop_assert_eq!(targets(&config, &gpus, &now), found);
    }
}
