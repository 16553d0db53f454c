//! A parser for the output of nvidia-smi. `tests/gpu` compares the driver layer with this output.

use std::collections::BTreeMap;

/// A GPU in the output of `nvidia-smi --query-gpu=… --format=csv,noheader,nounits`. The columns are
/// those of [`QUERY`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Index.
    pub index: u32,
    /// `GPU-<uuid>`.
    pub uuid: String,
    /// PCI address as gpush prints it: `0000:07:00.0`.
    pub pci: String,
    /// Product name.
    pub name: String,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Current MIG mode. `None` means that the GPU does not support MIG.
    pub mig: Option<bool>,
    /// MIG mode after the next reset.
    pub pending: Option<bool>,
    /// Driver version.
    pub driver: String,
}

/// The queried fields.
pub const QUERY: &str = "index,uuid,pci.bus_id,name,memory.total,mig.mode.current,mig.mode.pending,driver_version";

/// Parses the GPUs in the output of a query.
///
/// # Errors
/// The first line that cannot be parsed.
pub fn gpus(text: &str) -> Result<Vec<Gpu>, String> {
    text.lines().filter(|line| !line.trim().is_empty()).map(|line| gpu(line).ok_or_else(|| line.to_owned())).collect()
}

fn gpu(line: &str) -> Option<Gpu> {
    let fields: Vec<_> = line.split(',').map(str::trim).collect();
    let [index, uuid, pci, name, memory, mig, pending, driver] = fields[..] else { return None };
    Some(Gpu {
        index: index.parse().ok()?,
        uuid: uuid.to_owned(),
        // nvidia-smi writes the domain with eight digits, and gpush with four.
        pci: pci.get(pci.len().checked_sub(12)?..)?.to_lowercase(),
        name: name.to_owned(),
        memory_mib: memory.parse().ok()?,
        mig: mode(mig),
        pending: mode(pending),
        driver: driver.to_owned(),
    })
}

fn mode(text: &str) -> Option<bool> {
    match text {
        "Enabled" => Some(true),
        "Disabled" => Some(false),
        _ => None,
    }
}

/// A row of the table of `nvidia-smi mig -lgip`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// Name without the prefix `MIG `.
    pub name: String,
    /// Profile id.
    pub id: u32,
    /// Maximum number of instances.
    pub max: u8,
    /// Memory in hundredths of a GiB, as printed.
    pub memory_centi_gib: u64,
    /// Number of streaming multiprocessors.
    pub sm: u32,
    /// Numbers of decoders, encoders, copy engines, JPEG decoders and optical flow accelerators.
    pub engines: [u8; 5],
}

/// Returns the profiles by GPU index.
#[must_use]
pub fn profiles(text: &str) -> BTreeMap<u32, Vec<Profile>> {
    let mut all: BTreeMap<u32, Vec<Profile>> = BTreeMap::new();
    let mut rows = rows(text).peekable();
    while let Some(row) = rows.next() {
        let [gpu, "MIG", name, id, instances, memory, _, sm, dec, enc] = row[..] else { continue };
        let Some(second) = rows.peek() else { continue };
        let [ce, jpeg, ofa] = second[..] else { continue };
        let profile = || {
            Some(Profile {
                name: name.to_owned(),
                id: id.parse().ok()?,
                max: instances.split_once('/')?.1.parse().ok()?,
                memory_centi_gib: memory.replace('.', "").parse().ok()?,
                sm: sm.parse().ok()?,
                engines: [
                    dec.parse().ok()?,
                    enc.parse().ok()?,
                    ce.parse().ok()?,
                    jpeg.parse().ok()?,
                    ofa.parse().ok()?,
                ],
            })
        };
        if let (Ok(gpu), Some(profile)) = (gpu.parse(), profile()) {
            all.entry(gpu).or_default().push(profile);
        }
    }
    all
}

/// A line of `nvidia-smi mig -lgipp`: (GPU index, profile id) and (start slices, size).
pub type Placements = ((u32, u32), (Vec<u8>, u8));

/// Returns placements by GPU index and profile id.
#[must_use]
pub fn placements(text: &str) -> BTreeMap<(u32, u32), (Vec<u8>, u8)> {
    text.lines().filter_map(placement).collect()
}

/// Parses `GPU  0 Profile ID 19 Placements: {0,1,2,3,4,5,6}:1`.
fn placement(line: &str) -> Option<Placements> {
    let (head, tail) = line.split_once('{')?;
    let words: Vec<_> = head.split_whitespace().collect();
    let (gpu, id) = (words.get(1)?.parse().ok()?, words.get(4)?.parse().ok()?);
    let (starts, size) = tail.split_once("}:")?;
    let starts: Result<Vec<u8>, _> = starts.split(',').map(|start| start.trim().parse()).collect();
    Some(((gpu, id), (starts.ok()?, size.trim().parse().ok()?)))
}

/// Returns the GPU instances of `nvidia-smi mig -lgi`. The fields are GPU, name, profile id,
/// instance id, start and size.
#[must_use]
pub fn gpu_instances(text: &str) -> Vec<(u32, String, u32, u32, u8, u8)> {
    rows(text)
        .filter_map(|row| {
            let [gpu, "MIG", name, profile, id, placement] = row[..] else { return None };
            let (start, size) = placement.split_once(':')?;
            Some((
                gpu.parse().ok()?,
                name.to_owned(),
                profile.parse().ok()?,
                id.parse().ok()?,
                start.parse().ok()?,
                size.parse().ok()?,
            ))
        })
        .collect()
}

/// Returns the UUIDs of the MIG devices that `nvidia-smi -L` lists, sorted.
#[must_use]
pub fn mig_uuids(text: &str) -> Vec<String> {
    let mut uuids: Vec<_> = text
        .lines()
        .filter_map(|line| Some(line.split_once("(UUID: ")?.1.trim_end().trim_end_matches(')').to_owned()))
        .filter(|uuid| uuid.starts_with("MIG-"))
        .collect();
    uuids.sort();
    uuids
}

/// Returns the words of each table row.
fn rows(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines().filter_map(|line| {
        let row = line.trim().strip_prefix('|')?.strip_suffix('|')?;
        Some(row.split_whitespace().collect())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvidia_smi_query_is_parsed() {
        let text = "0, GPU-1, 00000000:07:00.0, NVIDIA H200, 143771, Enabled, Disabled, 570.86.15\n\
                    1, GPU-2, 00000001:0A:00.0, NVIDIA L4, 23034, [N/A], [N/A], 570.86.15\n";
        let gpus = gpus(text).unwrap();
        assert_eq!((gpus[0].mig, gpus[0].pending), (Some(true), Some(false)));
        assert_eq!((gpus[0].pci.as_str(), gpus[1].pci.as_str()), ("0000:07:00.0", "0001:0a:00.0"));
        assert_eq!((gpus[1].index, gpus[1].memory_mib, gpus[1].mig), (1, 23_034, None));
        assert_eq!(super::gpus("nonsense\n"), Err("nonsense".to_owned()));
    }

    #[test]
    fn nvidia_smi_profile_table_is_parsed() {
        let text = "\
+-----------------------------------------------------------------------------+
| GPU instance profiles:                                                      |
| GPU   Name             ID    Instances   Memory     P2P    SM    DEC   ENC  |
|                              Free/Total   GiB              CE    JPEG  OFA  |
|=============================================================================|
|   0  MIG 1g.10gb       19     7/7        9.50       No     14     0     0   |
|                                                             1     0     0   |
+-----------------------------------------------------------------------------+
|   0  MIG 7g.80gb        0     0/1        79.25      No     98     5     0   |
|                                                             7     1     1   |
+-----------------------------------------------------------------------------+
";
        let all = profiles(text);
        assert_eq!(all[&0].len(), 2);
        let whole = &all[&0][1];
        assert_eq!((whole.name.as_str(), whole.id, whole.max, whole.memory_centi_gib), ("7g.80gb", 0, 1, 7925));
        assert_eq!((whole.sm, whole.engines), (98, [5, 0, 7, 1, 1]));
    }

    #[test]
    fn nvidia_smi_placements_instances_and_devices_are_parsed() {
        let text = "GPU  0 Profile ID 19 Placements: {0,1,2,3,4,5,6}:1\nGPU  3 Profile ID  0 Placement : {0}:8\n";
        let all = placements(text);
        assert_eq!(all[&(0, 19)], ((0..7).collect(), 1));
        assert_eq!(all[&(3, 0)], (vec![0], 8));
        let text = "|   0  MIG 3g.40gb          9        2          4:4     |\n| GPU   Name  |\n";
        assert_eq!(gpu_instances(text), [(0, "3g.40gb".to_owned(), 9, 2, 4, 4)]);
        let text =
            "GPU 0: NVIDIA A100 (UUID: GPU-1)\n  MIG 3g.40gb     Device  0: (UUID: MIG-b)\n  MIG x (UUID: MIG-a)\n";
        assert_eq!(mig_uuids(text), ["MIG-a", "MIG-b"]);
    }
}
