//! Descriptions: presets, TOML, and error messages.
#![allow(clippy::unwrap_used)] // A test that cannot continue has failed.

use gpush_geometry::PRESETS;
use silicon::machine::Chip;
use silicon::{Description, Host, HostError, Machine};

#[test]
fn every_preset_is_a_host() {
    for preset in PRESETS {
        let machine = Machine::new(&Description::preset(preset.name).unwrap()).unwrap();
        let expected: u32 = preset.gpus.iter().map(|(_, count)| count).sum();
        assert_eq!(machine.gpus().len() as u32, expected, "{}", preset.name);
        for gpu in machine.gpus() {
            let part = machine.part(gpu.index).unwrap();
            assert_eq!(gpu.mig, part.has_mig());
            let least = part.model.min_driver.parse().unwrap();
            assert!(machine.hardware().driver >= least, "{}", preset.name);
        }
    }
    println!("{} presets made", PRESETS.len());
    let driver = |name: &str| Description::preset(name).unwrap().driver().unwrap().to_string();
    assert_eq!(driver("dgx-a100"), "550.163.01");
    assert_eq!(driver("dgx-b200"), "570.133.20");
    assert_eq!(driver("rtx-pro-6000x2"), "575.51.03");
    let error = Description::preset("dgx-a10").unwrap_err().to_string();
    assert_eq!(error, "there is no preset `dgx-a10`; did you mean `dgx-a100` or `dgx-h100`?");
}

#[test]
fn description_file_has_every_key() {
    let text = r#"
        driver = "535.183.01"
        cuda = "12.2"
        seed = 7
        owner_is_root = false
        latencies = true

        [[gpu]]
        model = "a100-80"
        count = 3
        chip = "slot3_missing"
        mig = false
        board = "20b5"

        [[gpu]]
        model = "t4"
        serial = "1234567890123"
    "#;
    let hardware = Description::parse(text).unwrap().hardware().unwrap();
    assert_eq!((hardware.driver.to_string().as_str(), hardware.cuda), ("535.183.01", 12_020));
    assert!(!hardware.owner_is_root && hardware.latencies);
    let names: Vec<&str> = hardware.slots.iter().map(|slot| slot.identity.name.as_str()).collect();
    assert_eq!(names, ["NVIDIA A100 80GB PCIe", "NVIDIA A100 80GB PCIe", "NVIDIA A100 80GB PCIe", "Tesla T4"]);
    assert_eq!(hardware.slots[0].part.chip, Chip::Slot3Missing);
    assert_eq!(hardware.slots[3].identity.serial, "1234567890123");
    assert!(!hardware.slots[0].identity.mig_at_start);
    let distinct = |of: fn(&silicon::machine::Identity) -> String| {
        let all: std::collections::BTreeSet<String> = hardware.slots.iter().map(|slot| of(&slot.identity)).collect();
        all.len()
    };
    assert_eq!(distinct(|identity| identity.uuid.clone()), 4);
    assert_eq!(distinct(|identity| identity.serial.clone()), 4);
    assert_eq!(distinct(silicon::machine::Identity::pci_address), 4);
}

#[test]
fn sixty_four_gpus_are_the_maximum() {
    let host = |count: u32| Description::parse(&format!("[[gpu]]\nmodel = \"a30-24\"\ncount = {count}\n"));
    let machine = Machine::new(&host(64).unwrap()).unwrap();
    let buses: std::collections::BTreeSet<String> =
        (0..64).map(|gpu| machine.identity(gpu).unwrap().pci_address()).collect();
    assert_eq!(buses.len(), 64);
    let error = host(65).unwrap_err().to_string();
    assert_eq!(error, "line 3, column 9: more than 64 GPUs are described; lower the counts to 64 in all");
    assert!(host(u32::MAX).is_err());
}

#[test]
fn invalid_descriptions_have_place_and_fix() {
    let tried = [
        ("", "line 1, column 1: no GPU is described; add `[[gpu]]`"),
        ("[[gpu]]\nmodle = \"t4\"\n", "line 2, column 1: unknown key `modle`; did you mean `model`?"),
        ("[[gpu]]\nmodel = \"a100\"\n", "line 2, column 9: there is no GPU model `a100`; did you mean `a100-40`"),
        ("[[gpu]]\nmodel = 5\n", "line 2, column 9: invalid type: integer `5`, expected a string"),
        ("[[gpu]]\nmodel = \"t4\"\ncount = 0\n", "line 3, column 9: `count = 0` of t4"),
        ("[[gpu]]\nmodel = \"t4\"\ncount = -1\n", "line 3, column 9: invalid value"),
        ("[[gpu]]\nmodel = \"a30-24\"\nchip = \"slot5\"\n", "line 3, column 8: unknown value `slot5`"),
        ("[[gpu]]\nmodel = \"t4\"\nmig = true\n", "line 3, column 7: the Tesla T4 has no MIG"),
        ("[[gpu]]\nmodel = \"t4\"\nmig_at_boot = true\n", "line 2, column 9: the Tesla T4 has no MIG"),
        (
            "[[gpu]]\nmodel = \"t4\"\nboard = \"20B5\"\n",
            "line 3, column 9: the Tesla T4 has no board `20B5`; known: 1EB8",
        ),
        ("[[gpu]]\nmodel = \"t4\"\ncount = 2\nserial = \"1\"\n", "line 4, column 10: 2 GPUs cannot have one serial"),
        ("driver = \"new\"\n[[gpu]]\nmodel = \"t4\"\n", "`new` is no driver version; write it as 550.163.01"),
        ("cuda = \"new\"\n[[gpu]]\nmodel = \"t4\"\n", "line 1, column 8: `new` is no CUDA version"),
        (
            "driver = \"550.163.01\"\n[[gpu]]\nmodel = \"b200-180\"\n",
            "line 1, column 10: driver 550.163.01 does not know the B200",
        ),
        ("[[gpu]\nmodel = \"t4\"\n", "line 1, column"),
        ("[[gpu]]\nmodel = \"t4\"\nmodel = \"l4\"\n", "line 3, column 1: duplicate key"),
    ];
    for (text, expected) in tried {
        let error = Description::parse(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}\n  is refused with: {error}\n  expected: {expected}");
    }
    println!("{} wrong descriptions refused", tried.len());
}

#[test]
fn host_is_created_once_and_opened_by_path() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("new");
    let nothing = Host::open(&at).unwrap_err();
    assert!(matches!(nothing, HostError::NotAHost { .. }), "{nothing}");
    assert!(nothing.to_string().contains("gpush-sim up PRESET"), "{nothing}");
    let description = Description::preset("mixed").unwrap();
    let made = Host::create(&at, &description).unwrap();
    assert!(matches!(Host::create(&at, &description), Err(HostError::Exists { .. })));
    let opened = Host::open(&at).unwrap();
    assert_eq!(opened.read().unwrap().state(), made.read().unwrap().state());
    // If the description does not match the state, it belongs to another host.
    let path = at.join("description.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("seed = 0", "seed = 1")).unwrap();
    assert!(matches!(Host::open(&at), Err(HostError::Mismatch { .. })));
}
