use gpush_api::GpuIndex;
use proptest::prelude::*;

use super::*;
use crate::preset;

fn host() -> Vec<Gpu> {
    let mut gpus = preset::gpus("mixed").unwrap();
    gpus.extend(preset::gpus("dgx-h100").unwrap().drain(..2));
    for (at, gpu) in gpus.iter_mut().enumerate() {
        gpu.index = GpuIndex(u32::try_from(at).unwrap());
        gpu.uuid = format!("GPU-{}a3b1c2d-0000-0000-0000-{at:012}", at / 2).into();
        gpu.pci = format!("0000:{:02X}:00.0", 7 + at);
    }
    gpus
}

#[test]
fn each_selector_form_matches_its_gpus() {
    let gpus = host();
    let cases: &[(&str, &[usize])] = &[
        ("0", &[0]),
        ("7", &[7]),
        (" 3 ", &[3]),
        ("2-4", &[2, 3, 4]),
        ("0,2", &[0, 2]),
        ("2-4,3,1", &[1, 2, 3, 4]),
        ("all", &[0, 1, 2, 3, 4, 5, 6, 7]),
        ("ALL", &[0, 1, 2, 3, 4, 5, 6, 7]),
        ("GPU-0a3b1c2d-0000-0000-0000-000000000001", &[1]),
        ("gpu-0A3B1C2D-0000-0000-0000-000000000001", &[1]),
        ("0a3b1c2d-0000-0000-0000-000000000001", &[1]),
        ("0000:07:00.0", &[0]),
        ("07:00.0", &[0]),
        ("00000000:0e:00.0", &[7]),
        ("0E:00", &[7]),
        ("0x20B210DE", &[0]),
        ("0X233010de", &[2, 6, 7]),
        ("0x20b210de:0x146310DE", &[0]),
        ("*A100*", &[0]),
        ("*a100*", &[0]),
        ("*H?00*", &[2, 3, 6, 7]),
        ("*", &[0, 1, 2, 3, 4, 5, 6, 7]),
        ("Tesla T4", &[5]),
        ("nvidia l4", &[4]),
        ("L4", &[4]),
        ("A100-SXM4-80GB", &[0]),
        ("NVIDIA A100-SXM4-80GB", &[0]),
        ("h100 80gb hbm3", &[2, 6, 7]),
        ("NVIDIA Tesla T4", &[5]),
        ("A100*", &[0]),
        ("NVIDIA *", &[0, 1, 2, 3, 4, 6, 7]),
    ];
    for (text, expected) in cases {
        assert_eq!(Selector::resolve(&[text], &gpus).as_deref(), Ok(*expected), "{text}");
        let canonical: Vec<String> = text.split(',').map(|one| one.parse::<Selector>().unwrap().to_string()).collect();
        assert_eq!(Selector::resolve(&canonical, &gpus).as_deref(), Ok(*expected), "{text} as {canonical:?}");
    }
    println!("{} selectors", cases.len());
}

#[test]
fn unique_uuid_prefix_matches() {
    let mut gpus = host();
    gpus[3].uuid = "GPU-f0000000-0000-0000-0000-000000000001".into();
    assert_eq!(Selector::resolve(&["GPU-f"], &gpus), Ok(vec![3]));
}

#[test]
fn unmatched_selector_lists_the_gpus() {
    let gpus = host();
    let texts = [
        "",
        "8",
        "0-8",
        "3-1",
        "3-",
        "-1",
        "1.5",
        "4294967296",
        "0x1",
        "0x20B2",
        "0x20B510DE",
        "0x20B210DE:0x000010DE",
        "GPU-",
        "GPU-xyz",
        "GPU-0a3b1c2d",
        "GPU-9",
        "MIG-1234",
        "0000:aa:00.0",
        "07:00.9",
        "a:b:c:d",
        "*B200*",
        "A100",
        "foo",
        "0,,1",
        "!",
        "3\u{7}",
        "GPU 0",
    ];
    let mut shown = String::new();
    for text in texts {
        let error = Selector::resolve(&[text], &gpus).expect_err(text);
        let _ = writeln!(shown, "--gpu '{}' ({:?})\n  {}", text.escape_default(), error.code, error.message);
        assert_eq!(error.code.exit_status(), 2);
        if !error.message.contains("several UUIDs") {
            assert!(error.causes[0].contains("8 GPUs: 0 NVIDIA A100-SXM4-80GB"), "{text}");
        }
        let _ = writeln!(shown, "  {}\n", error.hint.unwrap());
    }
    println!("{} selectors that name nothing", texts.len());
    insta::assert_snapshot!(shown);
}

/// L4 is a GPU model, so only a name that no GPU has can be meant as a lease.
#[test]
fn id_of_a_lease_leads_to_the_lease() {
    let gpus = host();
    let hint = Selector::resolve(&["l3"], &gpus).unwrap_err().hint.unwrap();
    assert_eq!(hint, "for a lease, use `gpushctl lease show L3`");
    assert_eq!(Selector::resolve(&["L4"], &gpus), Ok(vec![4]));
}

#[test]
fn host_without_gpus_is_named_in_selector_error() {
    let error = Selector::resolve(&["all"], &[] as &[Gpu]).unwrap_err();
    assert_eq!(error.message, "there is no GPU");
    assert_eq!(inventory::<Gpu>(&[]), "the driver shows no GPU on this host");
}

#[test]
fn equal_gpus_are_listed_together() {
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    assert_eq!(inventory(&gpus), "there are 8 GPUs: 0-7 NVIDIA A100-SXM4-80GB");
    gpus.remove(3);
    assert_eq!(inventory(&gpus), "there are 7 GPUs: 0-2 NVIDIA A100-SXM4-80GB, 4-7 NVIDIA A100-SXM4-80GB");
}

#[test]
fn too_many_selectors_are_refused_by_number() {
    let gpus = preset::gpus("dgx-a100").unwrap();
    assert_eq!(Selector::resolve(&["0"; MOST], &gpus).unwrap(), [0]);
    assert_eq!(Selector::resolve(&[vec!["0"; MOST].join(",")], &gpus).unwrap(), [0]);
    for texts in [vec!["0".to_owned(); MOST + 1], vec![vec!["0"; MOST].join(","), "1".to_owned()]] {
        let error = Selector::resolve(&texts, &gpus).unwrap_err();
        assert_eq!(error.code, Code::BadRequest);
        assert_eq!(error.message, "257 GPU selectors are too many: the limit is 256");
        assert!(error.hint.is_some());
    }
}

proptest! {
    #[test]
    fn garbage_never_panics_and_good_text_is_canonical(text in "\\PC{0,40}|[0-9a-fGPU:.*?-]{0,40}") {
        let gpus = host();
        let _ = Selector::resolve(&[&text], &gpus);
        if let Ok(selector) = text.parse::<Selector>() {
            prop_assert_eq!(selector.to_string().parse::<Selector>(), Ok(selector));
        }
    }

    #[test]
    fn globs_agree_with_a_simple_definition(glob in "[ab*?]{0,6}", text in "[ab]{0,6}") {
        fn plain(glob: &[u8], text: &[u8]) -> bool {
            match (glob.first(), text.first()) {
                (None, None) => true,
                (Some(b'*'), _) => plain(&glob[1..], text) || (!text.is_empty() && plain(glob, &text[1..])),
                (Some(b'?'), Some(_)) => plain(&glob[1..], &text[1..]),
                (Some(a), Some(b)) if a == b => plain(&glob[1..], &text[1..]),
                _ => false,
            }
        }
        prop_assert_eq!(glob_matches(&glob, &text), plain(glob.as_bytes(), text.as_bytes()));
    }
}
