//! MIG devices as a list, with their use.

use gpush_api::{DeviceUse, Gpu, GpuState, MigDevice, Mode, MpsDaemon};

use super::{
    Appearance,
    appearance::{IDLE, NOTE, QUIET, USED, gib, paint},
    listing::Listing,
    names::gpu_numbers,
    table::{Align, Narrow},
};

/// Columns that only `-o wide` shows.
const WIDE: [&str; 3] = ["PROFILE", "PIDS", "GPU UUID"];

/// Lists the MIG devices for `gpushctl mig list`. `gpus` are the selected GPUs.
pub(crate) fn list(devices: &[MigDevice], gpus: &[Gpu], look: &Appearance) -> Listing {
    use Align::{Left, Right};
    let columns = [
        ("GPU", Right),
        ("INSTANCE", Left),
        ("PROFILE", Left),
        ("GI", Right),
        ("CI", Right),
        ("GIB", Right),
        ("USE", Left),
        ("PIDS", Left),
        ("UUID", Left),
        ("GPU UUID", Left),
        ("DETAIL", Left),
    ];
    let is_shown = |name: &str| look.wide || !WIDE.contains(&name);
    let dash = || "-".to_owned();
    let row = |one: &MigDevice| {
        let row = [
            one.gpu.to_string(),
            look.clean(name(one)),
            look.clean(&one.profile),
            one.gi.to_string(),
            one.ci.map_or_else(dash, |ci| ci.to_string()),
            one.memory_mib.map_or_else(dash, gib),
            usage(one.usage),
            pids(one),
            one.uuid.as_ref().map_or_else(dash, |uuid| look.clean(uuid.as_str())),
            look.clean(one.gpu_uuid.as_str()),
            look.clean(&detail(one, look)),
        ];
        columns.iter().zip(row).filter(|((name, _), _)| is_shown(name)).map(|(_, cell)| cell).collect()
    };
    let shown: Vec<_> = columns.iter().copied().filter(|(name, _)| is_shown(name)).collect();
    // If there is not enough room, leave out other columns before shortening a UUID, because users copy UUIDs.
    let narrow = Narrow { uuids: Some("UUID"), ..Narrow::spare(&["GI", "CI", "GIB"]).prose() };
    Listing::new(&shown, devices.iter().map(row).collect(), narrow, look)
        .names(devices.iter().map(|one| format!("{}:{}", one.gpu, name(one))))
        .uuids(devices.iter().filter_map(|one| one.uuid.clone()))
        .or_empty(&none(gpus))
}

/// Returns the name of a device. Without a compute instance, returns the name of the GPU instance.
fn name(one: &MigDevice) -> &str {
    one.device.as_ref().unwrap_or(&one.instance)
}

fn usage(of: DeviceUse) -> String {
    let style = match of {
        DeviceUse::Free => IDLE,
        DeviceUse::Granted => QUIET,
        DeviceUse::InUse => USED,
        DeviceUse::Reserved => NOTE,
    };
    paint(style, of.name())
}

/// Returns the pids of the processes that the user may see.
fn pids(one: &MigDevice) -> String {
    let pids: Vec<String> = one.processes.iter().filter_map(|process| process.pid).map(|pid| pid.to_string()).collect();
    if pids.is_empty() { "-".to_owned() } else { pids.join(",") }
}

/// Describes how a device is used: its processes, the holders of its leases, or why it is reserved.
fn detail(one: &MigDevice, look: &Appearance) -> String {
    match one.usage {
        DeviceUse::Free => one.reason.as_ref().map_or_else(String::new, |reason| format!("no lease: {reason}")),
        DeviceUse::Reserved => {
            let granted = (!one.grants.is_empty()).then(|| format!("granted to {}", holders(one, look)));
            one.reason.iter().cloned().chain(granted).collect::<Vec<_>>().join("; ")
        }
        DeviceUse::InUse if one.processes.is_empty() => "MPS clients".to_owned(),
        DeviceUse::InUse if one.processes.len() == 1 => "1 process".to_owned(),
        DeviceUse::InUse => format!("{} processes", one.processes.len()),
        DeviceUse::Granted => holders(one, look),
    }
}

/// Returns the holders of the leases on a device, each with the id and the end of the lease.
fn holders(one: &MigDevice, look: &Appearance) -> String {
    let holder = |grant: &gpush_api::DeviceGrant| {
        let user = grant.user.clone().unwrap_or_else(|| format!("uid {}", grant.uid));
        let until = grant.expires_at.map_or_else(String::new, |at| format!(", ends {}", look.ahead(at)));
        format!("{user} ({}{until})", grant.id)
    };
    one.grants.iter().map(holder).collect::<Vec<_>>().join(", ")
}

/// Returns whether a new program can use a device. If the rule of the GPU has mode `mig`, the program gets the device
/// with a lease; otherwise gpushd grants no leases on the device, and the program uses it directly. `daemons` are the
/// MPS daemons of the host.
pub(crate) fn is_free(device: &MigDevice, gpu: &Gpu, daemons: &[MpsDaemon]) -> bool {
    let is_shared = || daemons.iter().any(|daemon| device.uuid.as_ref() == Some(&daemon.uuid));
    device.available || device.usage == DeviceUse::Free && gpu.mode != Mode::Mig && !is_shared()
}

/// Explains why there are no devices.
fn none(gpus: &[Gpu]) -> String {
    let which = gpu_numbers(&gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>());
    let have = if gpus.len() == 1 { "has" } else { "have" };
    let is_read = |gpu: &Gpu| !matches!(gpu.state, GpuState::Unknown | GpuState::Lost);
    if gpus.iter().all(|gpu| gpu.mig.is_none() && is_read(gpu)) {
        let support = if gpus.len() == 1 { "does" } else { "do" };
        return format!("{which} {support} not support MIG.");
    }
    if gpus.iter().all(|gpu| gpu.mig.as_ref().is_none_or(|mig| !mig.enabled)) {
        return format!("{which} {have} no MIG instance: MIG mode is off.");
    }
    format!("{which} {have} no MIG instance.")
}

#[cfg(test)]
mod tests {
    use gpush_api::{DeviceGrant, GpuIndex};

    use super::*;
    use crate::render::{Charset, fixtures};

    fn device(usage: DeviceUse) -> MigDevice {
        MigDevice {
            gpu: GpuIndex(0),
            gpu_uuid: "GPU-0".into(),
            instance: "1g.10gb@4".to_owned(),
            device: Some("1g.10gb@4".to_owned()),
            profile: "1g.10gb".to_owned(),
            gi: 11,
            ci: Some(0),
            uuid: Some("MIG-2ae0b6f1-0000-5000-8000-000000000000".into()),
            memory_mib: Some(9856),
            usage,
            available: usage == DeviceUse::Free,
            grants: Vec::new(),
            processes: Vec::new(),
            reason: None,
        }
    }

    #[test]
    fn each_use_is_shown_with_its_detail() {
        let look = fixtures::look(80, Charset::Ascii);
        let granted = DeviceGrant {
            id: "s3".to_owned(),
            uid: 1000,
            user: Some("alice".to_owned()),
            expires_at: Some(look.now + jiff::SignedDuration::from_hours(3)),
        };
        let devices = [
            device(DeviceUse::Free),
            MigDevice { grants: vec![granted.clone()], ..device(DeviceUse::Granted) },
            MigDevice {
                profile: "1c.1g.10gb".to_owned(),
                device: Some("1c.1g.10gb@4/1".to_owned()),
                ..device(DeviceUse::InUse)
            },
            MigDevice {
                reason: Some("the GPU is cordoned".to_owned()),
                grants: vec![granted],
                ci: None,
                device: None,
                uuid: None,
                ..device(DeviceUse::Reserved)
            },
        ];
        let listing = list(&devices, &[], &look);
        insta::assert_snapshot!(fixtures::plain(listing.text()), @r"
        GPU  INSTANCE        CI  GIB  USE       UUID
          0  1g.10gb@4        0  9.6  free      MIG-2ae0b6f1-0000-5000-8000-000000000000
          0  1g.10gb@4        0  9.6  granted   MIG-2ae0b6f1-0000-5000-8000-000000000000
            alice (s3, ends in 3h)
          0  1c.1g.10gb@4/1   0  9.6  in_use    MIG-2ae0b6f1-0000-5000-8000-000000000000
            MPS clients
          0  1g.10gb@4        -  9.6  reserved  -
            the GPU is cordoned; granted to alice (s3, ends in 3h)
        ");
        // Fault: all parts of a GPU instance had the name of the GPU instance.
        assert_eq!(listing.name_lines().lines().nth(2), Some("0:1c.1g.10gb@4/1"));
        assert_eq!(listing.uuid_lines().unwrap().lines().count(), 3);
        assert!(
            listing.csv(true).starts_with("gpu,instance,gi,ci,gib,use,uuid,detail\n0,1g.10gb@4,11,0,9.6,free,MIG-")
        );
    }

    #[test]
    fn list_fits_the_terminal_and_shortens_uuids_last() {
        let devices = [device(DeviceUse::Free), device(DeviceUse::InUse)];
        for width in [60, 72, 80, 100, 120] {
            let look = fixtures::look(width, Charset::Utf8);
            let text = fixtures::plain(list(&devices, &[], &look).text());
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}:\n{text}");
            let uuid = if width < 72 { "MIG-2ae0b6f1…" } else { devices[0].uuid.as_ref().unwrap().as_str() };
            assert!(text.contains(uuid), "{width}:\n{text}");
        }
        let pipe = Appearance { wraps: false, ..fixtures::look(60, Charset::Utf8) };
        assert!(list(&devices, &[], &pipe).text().contains(devices[0].uuid.as_ref().unwrap().as_str()));
    }

    #[test]
    fn wide_list_has_more_columns() {
        let mut busy = device(DeviceUse::InUse);
        busy.processes = vec![fixtures::process(4123, "alice", "train", 1), fixtures::hidden()];
        let look = Appearance { wraps: false, wide: true, ..fixtures::look(60, Charset::Ascii) };
        let text = list(&[busy], &[], &look).text().to_owned();
        insta::assert_snapshot!(fixtures::plain(&text), @r"
        GPU  INSTANCE   PROFILE  GI  CI  GIB  USE     PIDS  UUID                                      GPU UUID  DETAIL
          0  1g.10gb@4  1g.10gb  11   0  9.6  in_use  4123  MIG-2ae0b6f1-0000-5000-8000-000000000000  GPU-0     2 processes
        ");
    }
}
