//! MIG profiles of GPUs: which instances are possible, and where.

use gpush_api::{Engines, Gpu, GpuIndex, GpuProfile, Placement};

use super::{
    Appearance,
    appearance::{NOTE, gib, paint, product},
    listing::Listing,
    names::gpu_numbers,
    plan::headline,
    table::{Align, Narrow, fitted, table},
};

/// Formats placements in the notation of nvidia-smi, but without braces: start slices and size, such as `0-6:1` or
/// `0,4:4`.
pub(crate) fn placements(placements: &[Placement]) -> String {
    let mut sizes: Vec<u8> = placements.iter().map(|p| p.size).collect();
    sizes.dedup();
    let parts: Vec<_> = sizes
        .iter()
        .map(|size| {
            let starts: Vec<u8> = placements.iter().filter(|p| p.size == *size).map(|p| p.start).collect();
            format!("{}:{size}", starts_of(&starts))
        })
        .collect();
    parts.join(" ")
}

fn starts_of(starts: &[u8]) -> String {
    match starts {
        [first, .., last] if starts.len() > 2 && starts.windows(2).all(|w| w[1] == w[0] + 1) => {
            format!("{first}-{last}")
        }
        all => all.iter().map(u8::to_string).collect::<Vec<_>>().join(","),
    }
}

/// Returns how many more instances of a profile are possible, and the maximum: `3/7`. If the GPUs differ, the first
/// number is a range: `0-7/7`.
fn free(of: &[&GpuProfile]) -> String {
    let remaining: Option<Vec<u8>> = of.iter().map(|p| p.remaining).collect();
    let most = of.first().map_or(0, |p| p.max);
    match remaining.as_deref().map(|all| (all.iter().min(), all.iter().max())) {
        Some((Some(low), Some(high))) if low == high => format!("{low}/{most}"),
        Some((Some(low), Some(high))) => format!("{low}-{high}/{most}"),
        Some(_) | None => format!("-/{most}"),
    }
}

/// A function that returns how many engines of one kind a profile has.
type CountOf = fn(&Engines) -> u8;

/// The kinds of engines, with their headings.
const ENGINES: [(&str, CountOf); 5] =
    [("COPY", |e| e.copy), ("DEC", |e| e.decoder), ("ENC", |e| e.encoder), ("JPEG", |e| e.jpeg), ("OFA", |e| e.ofa)];

/// Draws a table of the GPU instance profiles of `gpus`. All of these GPUs have the same profiles.
fn of_group(gpus: &[&Gpu], indent: usize, look: &Appearance) -> String {
    let all: Vec<&[GpuProfile]> = gpus.iter().filter_map(|g| g.mig.as_ref()).map(|m| m.profiles.as_slice()).collect();
    let Some(first) = all.first() else { return String::new() };
    // Leave out a column that has only zeros. For example, no GPU with MIG has video encoders.
    let engines: Vec<_> = ENGINES.iter().filter(|(_, of)| first.iter().any(|p| of(&p.engines) > 0)).collect();
    let mut columns = vec![
        ("PROFILE", Align::Left),
        ("ID", Align::Right),
        ("FREE", Align::Right),
        ("SLICES", Align::Right),
        ("GIB", Align::Right),
        ("SM", Align::Right),
    ];
    columns.extend(engines.iter().map(|(name, _)| (*name, Align::Right)));
    columns.push(("PLACEMENTS", Align::Left));
    if look.wide {
        columns.push(("COMPUTE PROFILES", Align::Left));
    }
    let rows = first
        .iter()
        .enumerate()
        .map(|(at, profile)| {
            let same: Vec<_> = all.iter().filter_map(|profiles| profiles.get(at)).collect();
            let mut row = vec![
                look.clean(&profile.name),
                profile.id.to_string(),
                free(&same),
                profile.slices.to_string(),
                gib(profile.memory_mib),
                profile.sm.to_string(),
            ];
            row.extend(engines.iter().map(|(_, of)| of(&profile.engines).to_string()));
            row.push(placements(&profile.placements));
            if look.wide {
                let names: Vec<String> = profile.compute.iter().map(|one| look.clean(&one.name)).collect();
                row.push(names.join(" "));
            }
            row
        })
        .collect();
    let spare = &["OFA", "JPEG", "ENC", "DEC", "COPY", "SM"];
    fitted(&columns, rows, Narrow::spare(spare), indent, look)
}

/// Returns whether two GPUs have the same profiles. Different placements may be free.
fn alike(a: &Gpu, b: &Gpu) -> bool {
    let profiles = |gpu: &Gpu| {
        let mut profiles = gpu.mig.as_ref().map(|m| m.profiles.to_vec()).unwrap_or_default();
        profiles.iter_mut().for_each(|p| p.remaining = None);
        profiles
    };
    let on = |gpu: &Gpu| gpu.mig.as_ref().is_some_and(|m| m.enabled);
    a.name == b.name && on(a) == on(b) && profiles(a) == profiles(b)
}

/// Lists the profiles of `gpushctl mig profiles`, in every format.
pub(crate) fn profiles(gpus: &[Gpu], look: &Appearance) -> Listing {
    let all = || gpus.iter().flat_map(|gpu| gpu.mig.iter().flat_map(|mig| &*mig.profiles).map(move |one| (gpu, one)));
    let row = |(gpu, one): (&Gpu, &GpuProfile)| {
        vec![
            gpu.index.to_string(),
            look.clean(&one.name),
            one.id.to_string(),
            one.remaining.map_or_else(|| "-".to_owned(), |remaining| remaining.to_string()),
            one.max.to_string(),
            one.slices.to_string(),
            gib(one.memory_mib),
            one.sm.to_string(),
            placements(&one.placements),
        ]
    };
    let columns = [
        ("GPU", Align::Right),
        ("PROFILE", Align::Left),
        ("ID", Align::Right),
        ("FREE", Align::Right),
        ("MAX", Align::Right),
        ("SLICES", Align::Right),
        ("GIB", Align::Right),
        ("SM", Align::Right),
        ("PLACEMENTS", Align::Left),
    ];
    let mut names: Vec<String> = all().map(|(_, one)| one.name.clone()).collect();
    names.sort();
    names.dedup();
    let list = Listing::new(&columns, all().map(row).collect(), Narrow::spare(&["SM"]), look).names(names);
    // Without headings, each line must name its GPU.
    if look.headings { list.drawn(tables(gpus, look)) } else { list }
}

/// Draws a table for each kind of GPU.
pub(crate) fn tables(gpus: &[Gpu], look: &Appearance) -> String {
    let mut groups: Vec<Vec<&Gpu>> = Vec::new();
    for gpu in gpus {
        match groups.iter_mut().find(|group| alike(group[0], gpu)) {
            Some(group) => group.push(gpu),
            None => groups.push(vec![gpu]),
        }
    }
    let mut out = String::new();
    for group in groups {
        if !out.is_empty() {
            out.push('\n');
        }
        let indexes: Vec<GpuIndex> = group.iter().map(|g| g.index).collect();
        out += &headline(&gpu_numbers(&indexes), &look.clean(product(&group[0].name)), "", look);
        out.push('\n');
        out += &match &group[0].mig {
            None => "  this GPU does not support MIG\n".to_owned(),
            Some(mig) => {
                let off = if mig.enabled {
                    String::new()
                } else {
                    paint(NOTE, "  MIG mode is off: enable it to see what is free") + "\n"
                };
                off + &of_group(&group, 2, look)
            }
        };
    }
    out
}

/// Draws the GPU instance profiles of one GPU, each with its compute instance profiles, for `gpu show`.
pub(crate) fn with_compute(gpu: &Gpu, indent: usize, look: &Appearance) -> String {
    let Some(mig) = &gpu.mig else { return String::new() };
    let mut out = of_group(&[gpu], indent, look);
    let split: Vec<_> = mig.profiles.iter().filter(|p| p.compute.len() > 1).collect();
    if split.is_empty() {
        return out;
    }
    let columns = [
        ("COMPUTE", Align::Left),
        ("ID", Align::Right),
        ("MAX", Align::Right),
        ("SLICES", Align::Right),
        ("SM", Align::Right),
        ("SLOTS", Align::Left),
    ];
    let rows = split
        .iter()
        .flat_map(|p| &p.compute)
        .map(|c| {
            vec![
                look.clean(&c.name),
                c.id.to_string(),
                c.max.to_string(),
                c.slices.to_string(),
                c.sm.to_string(),
                placements(&c.placements),
            ]
        })
        .collect();
    out.push('\n');
    out += &table(&columns, rows, indent, look);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_headings_each_line_is_a_profile_of_a_gpu() {
        let gpus = gpush_core::preset::gpus("mixed").unwrap();
        let look = Appearance { headings: false, ..crate::render::fixtures::look(200, crate::render::Charset::Ascii) };
        let listing = super::profiles(&gpus, &look);
        let count: usize = gpus.iter().filter_map(|gpu| gpu.mig.as_ref()).map(|mig| mig.profiles.len()).sum();
        let text = listing.text_without_headings();
        assert_eq!(text.lines().count(), count, "{text}");
        for line in text.lines() {
            assert!(line.split_whitespace().next().is_some_and(|word| word.parse::<u32>().is_ok()), "{line}");
        }
    }

    #[test]
    fn placements_are_short() {
        let at = |starts: &[u8], size| starts.iter().map(|s| Placement { start: *s, size }).collect::<Vec<_>>();
        assert_eq!(placements(&at(&[0, 1, 2, 3, 4, 5, 6], 1)), "0-6:1");
        assert_eq!(placements(&at(&[0, 2, 4], 2)), "0,2,4:2");
        assert_eq!(placements(&at(&[0, 1], 2)), "0,1:2");
        assert_eq!(placements(&at(&[0], 8)), "0:8");
        assert_eq!(placements(&[at(&[0], 4), at(&[4], 3)].concat()), "0:4 4:3");
        assert_eq!(placements(&[]), "");
    }
}
