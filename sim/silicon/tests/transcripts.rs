//! Compares the ids that the simulator chooses with every transcript of creations that was recorded
//! on hardware.
#![allow(clippy::unwrap_used)] // A test that cannot continue has failed.

use gpush_geometry::TRANSCRIPTS;
use serde::Deserialize;
use silicon::description::GpuDescription;
use silicon::machine::Chip;
use silicon::{Description, Machine, Return};

#[derive(Deserialize)]
struct Transcript {
    gpu: String,
    chip_variant: String,
    create_in_order: Vec<String>,
    gi_ids: Vec<serde_json::Value>,
    source: String,
}

/// The transcript that the simulator's rule for ids does not reproduce.
///
/// On an empty GH200, the driver placed the first double-memory instances like 2g instances, at the
/// ids 5, 3 and 4. The simulator's rule begins at id 6, because id 6 leaves more (profile,
/// placement) pairs possible. A 2g instance cannot have id 6. Other transcripts do not show how the
/// driver decides, so the rule stays.
const EXCEPTION: (&str, [u32; 3], [u32; 3]) = ("gh200", [5, 3, 4], [6, 5, 3]);

fn machine(model: &str, chip: Chip) -> Machine {
    let gpu = GpuDescription { chip, ..GpuDescription::new(model, 1) };
    let mut description = Description::of_model(model, silicon::description::DriverVersion::NEWEST);
    description.gpus = vec![gpu];
    Machine::new(&description).unwrap()
}

/// Returns the id of a profile by its short name in a transcript. `2g` means the profile with 2
/// slices and no suffix.
fn profile_id(machine: &Machine, short: &str) -> u32 {
    let part = machine.part(0).unwrap();
    let index = match short {
        "1g" => 0,
        "2g" => 1,
        "3g" => 2,
        "4g" => 3,
        "7g" => 4,
        "1g.rev2" => 9,
        other => panic!("unknown short name {other}"),
    };
    part.profile_by_index(index).unwrap().data.id
}

/// Returns the GPU instance ids that the simulator chooses. `None` means INSUFFICIENT_RESOURCES.
fn choose(machine: &mut Machine, order: &[String]) -> Vec<Option<u32>> {
    order
        .iter()
        .map(|short| {
            let id = profile_id(machine, short);
            match machine.create_gpu_instance(0, id, None) {
                Ok(made) => Some(made.id),
                Err(rc) => {
                    assert_eq!(rc, Return::InsufficientResources);
                    None
                }
            }
        })
        .collect()
}

#[test]
fn recorded_transcripts_are_reproduced() {
    let transcripts: Vec<Transcript> = serde_json::from_str(TRANSCRIPTS).unwrap();
    let (mut reproduced, mut excepted) = (0, 0);
    for transcript in &transcripts {
        let model = match transcript.gpu.as_str() {
            "a100" | "a100 (ESXi)" => "a100-80",
            "h100-sxm" => "h100-80-sxm",
            "h100-pcie" => "h100-80-pcie",
            "rtxpro6000" => "rtxpro6000-96",
            "a30" => "a30-24",
            "gh200" => "gh200-96",
            other => panic!("no model for {other}"),
        };
        let chip = match transcript.chip_variant.as_str() {
            "slot7_missing" | "none_missing" => Chip::Slot7Missing,
            "slot3_missing" => Chip::Slot3Missing,
            other => panic!("no chip variant {other}"),
        };
        let recorded: Vec<Option<u32>> = transcript
            .gi_ids
            .iter()
            .map(|id| match id {
                serde_json::Value::Number(n) => Some(n.as_u64().unwrap() as u32),
                other => {
                    assert_eq!(other, "INSUFFICIENT_RESOURCES");
                    None
                }
            })
            .collect();
        let chosen = choose(&mut machine(model, chip), &transcript.create_in_order);
        if transcript.gpu == EXCEPTION.0 {
            assert_eq!(recorded, EXCEPTION.1.map(Some));
            assert_eq!(chosen, EXCEPTION.2.map(Some), "the exception changed: look at it again");
            excepted += 1;
        } else {
            assert_eq!(chosen, recorded, "{} {:?} ({})", transcript.gpu, transcript.create_in_order, transcript.source);
            reproduced += 1;
        }
    }
    println!("{reproduced} transcripts reproduced, {excepted} known exception");
    assert_eq!((reproduced, excepted), (10, 1));
}

#[test]
fn exception_matches_the_placement_of_2g() {
    let mut machine = machine("gh200-96", Chip::Slot7Missing);
    let id = profile_id(&machine, "2g");
    let chosen: Vec<u32> = (0..3).map(|_| machine.create_gpu_instance(0, id, None).unwrap().id).collect();
    assert_eq!(chosen, EXCEPTION.1, "then the note on the exception is wrong");
}

#[test]
fn h100_nvl_lacks_slot_3_as_observed() {
    // On hardware, creating the profiles 9, 15 and 19 in this order gave the ids 1, 5 and 13.
    let mut machine = machine("h100-nvl-94", Chip::Slot3Missing);
    let ids: Vec<u32> = [9, 15, 19].map(|id| machine.create_gpu_instance(0, id, None).unwrap().id).to_vec();
    assert_eq!(ids, [1, 5, 13]);
}
