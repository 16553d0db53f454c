//! MIG devices as a list, with their use.

use gpush_api::{DeviceUse, Gpu, GpuState, MigDevice};

use super::{
    Appearance,
    appearance::{IDLE, NOTE, QUIET, USED, gib, paint},
    listing::Listing,
    status::gpu_numbers,
    table::{Align, Narrow},
};

/// Lists the devices of `gpushctl mig list`. `gpus` are the selected GPUs.
pub(crate) fn list(devices: &[MigDevice], gpus: &[Gpu], look: &Appearance) -> Listing {
    use Align::{Left, Right};
    let columns = [
        ("GPU", Right),
        ("INSTANCE", Left),
        ("GI", Right),
        ("CI", Right),
        ("GIB", Right),
        ("USE", Left),
        ("UUID", Left),
        ("DETAIL", Left),
    ];
    let dash = || "-".to_owned();
    let row = |one: &MigDevice| {
        vec![
            one.gpu.to_string(),
            look.clean(&name(one)),
            one.gi.to_string(),
            one.ci.map_or_else(dash, |ci| ci.to_string()),
            one.memory_mib.map_or_else(dash, gib),
            usage(one.usage),
            one.uuid.as_ref().map_or_else(dash, |uuid| look.clean(uuid)),
            look.clean(&detail(one, look)),
        ]
    };
    // Do not cut UUIDs, because users copy them. So the line may be wider than a narrow terminal.
    let wide = Appearance { width: look.width.max(110), ..*look };
    Listing::new(&columns, devices.iter().map(row).collect(), Narrow { spare: &[], prose: true }, &wide)
        .names(devices.iter().map(|one| format!("{}:{}", one.gpu, one.instance)))
        .uuids(devices.iter().filter_map(|one| one.uuid.clone()))
        .or_empty(&none(gpus))
}

/// Names a device: `1c.3g.40gb in 3g.40gb@4`, or only the instance if the compute instance uses all of it.
fn name(one: &MigDevice) -> String {
    let whole = one.instance.split('@').next() == Some(&one.profile);
    if whole { one.instance.clone() } else { format!("{} in {}", one.profile, one.instance) }
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

/// Describes the use of a device: processes, lease holders with the end of the lease, or why it is reserved.
fn detail(one: &MigDevice, look: &Appearance) -> String {
    match one.usage {
        DeviceUse::Free => String::new(),
        DeviceUse::Reserved => one.reason.clone().unwrap_or_default(),
        DeviceUse::InUse if one.processes.is_empty() => "MPS clients".to_owned(),
        DeviceUse::InUse if one.processes.len() == 1 => "1 process".to_owned(),
        DeviceUse::InUse => format!("{} processes", one.processes.len()),
        DeviceUse::Granted => {
            let holder = |grant: &gpush_api::DeviceGrant| {
                let user = grant.user.clone().unwrap_or_else(|| format!("uid {}", grant.uid));
                let until = grant.expires_at.map_or_else(String::new, |at| format!(", ends {}", look.ahead(at)));
                format!("{user} ({}{until})", grant.id)
            };
            one.grants.iter().map(holder).collect::<Vec<_>>().join(", ")
        }
    }
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
    use gpush_api::DeviceGrant;

    use super::*;
    use crate::render::{Charset, fixtures};

    fn device(usage: DeviceUse) -> MigDevice {
        MigDevice {
            gpu: 0,
            gpu_uuid: "GPU-0".to_owned(),
            instance: "1g.10gb@4".to_owned(),
            profile: "1g.10gb".to_owned(),
            gi: 11,
            ci: Some(0),
            uuid: Some("MIG-2ae0b6f1-0000-5000-8000-000000000000".to_owned()),
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
            MigDevice { grants: vec![granted], ..device(DeviceUse::Granted) },
            MigDevice { profile: "1c.1g.10gb".to_owned(), ..device(DeviceUse::InUse) },
            MigDevice {
                reason: Some("the GPU is cordoned".to_owned()),
                ci: None,
                uuid: None,
                ..device(DeviceUse::Reserved)
            },
        ];
        let listing = list(&devices, &[], &look);
        insta::assert_snapshot!(fixtures::plain(listing.text()), @r"
        GPU  INSTANCE                 GI  CI  GIB  USE       UUID
          0  1g.10gb@4                11   0  9.6  free      MIG-2ae0b6f1-0000-5000-8000-000000000000
          0  1g.10gb@4                11   0  9.6  granted   MIG-2ae0b6f1-0000-5000-8000-000000000000
            alice (s3, ends in 3 h)
          0  1c.1g.10gb in 1g.10gb@4  11   0  9.6  in_use    MIG-2ae0b6f1-0000-5000-8000-000000000000
            MPS clients
          0  1g.10gb@4                11   -  9.6  reserved  -
            the GPU is cordoned
        ");
        assert_eq!(listing.name_lines().lines().next(), Some("0:1g.10gb@4"));
        assert_eq!(listing.uuid_lines().unwrap().lines().count(), 3);
        assert!(
            listing.csv(true).starts_with("gpu,instance,gi,ci,gib,use,uuid,detail\n0,1g.10gb@4,11,0,9.6,free,MIG-")
        );
    }
}
