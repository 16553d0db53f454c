use proptest::prelude::*;

use super::*;

/// Every notation of an entry, with its canonical form.
const GOOD: &[(&str, &str)] = &[
    ("3g.40gb", "3g.40gb"),
    ("3G.40GB", "3g.40gb"),
    ("1g.10gb*2", "1g.10gb*2"),
    ("1g.10gb*1", "1g.10gb"),
    ("1g.10gb@4", "1g.10gb@4"),
    ("1g.10gb @ 4", "1g.10gb@4"),
    ("1c.3g.40gb*3", "1c.3g.40gb*3"),
    ("1c.3g.40gb@4*3", "1c.3g.40gb@4*3"),
    ("1c.3g.40gb*3@4", "1c.3g.40gb@4*3"),
    ("3c.3g.40gb", "3c.3g.40gb"),
    ("1c.1g.20gb", "1c.1g.20gb"),
    ("1C.1G.20GB@2", "1c.1g.20gb@2"),
    ("1c.1g.20gb*4:mps", "1c.1g.20gb*4:mps"),
    ("2g.20gb:mps", "2g.20gb:mps"),
    ("2g.20gb*2:MPS", "2g.20gb*2:mps"),
    ("1g.10gb+me", "1g.10gb+me"),
    ("1g.24gb+me.all", "1g.24gb+me.all"),
    ("2g.48gb-me", "2g.48gb-me"),
    ("4g.96gb+gfx", "4g.96gb+gfx"),
    ("7g.180gb", "7g.180gb"),
    (" 3g.40gb , 2g.20gb,1g.10gb*2 ", "3g.40gb,2g.20gb,1g.10gb*2"),
    ("none", "none"),
    ("None", "none"),
];

/// Every kind of mistake.
const BAD: &[&str] = &[
    "",
    "  ",
    ",",
    "3g.40gb,",
    "3g.40gb,,1g.10gb",
    "3g40gb",
    "3g-40gb",
    "3g.40g",
    "3g.40",
    "3.40gb",
    "MIG 3g.40gb",
    "1g.24gb.me.all",
    "nvidia.com/mig-1g.10gb.me",
    "1g.10gb x2",
    "2x1g.10gb",
    "1g10gbx2",
    "1c3g40gb",
    "whole",
    "03g.40gb",
    "3g.040gb",
    "3g.40gb+",
    "3g.40gb+me+",
    "3g.40gb!",
    "@4",
    "*2",
    "1g.10gb*0",
    "1g.10gb*9",
    "1g.10gb*999999999999",
    "1g.10gb*two",
    "1g.10gb*-1",
    "1g.10gb*+1",
    "1g.10gb*",
    "1g.10gb@",
    "1g.10gb@x",
    "1g.10gb@300",
    "1g.10gb@4@5",
    "1g.10gb*2*2",
    "1g.10gb@4*2",
    "1c.1g.20gb@4*2",
    "1g.10gb:foo",
    "1g.10gb:",
    "1g.10gb:mps:mps",
    "1g.10gb:mps*2",
    "0c.3g.40gb",
    "4c.3g.40gb",
    "99999c.3g.40gb",
    "none,3g.40gb",
    "dynamic",
    "3g.40gb,1g10gb",
    "３g.40gb",
    "3g.40gb\u{0}",
    "🦀",
];

#[test]
fn layouts_have_their_canonical_forms() {
    for (written, canonical) in GOOD {
        let layout = Layout::parse(written).unwrap_or_else(|e| panic!("{written}: {e}"));
        assert_eq!(layout.to_string(), *canonical, "{written}");
        assert_eq!(Layout::parse_list(&layout.canonical()).unwrap(), layout, "{written}");
    }
    println!("{} ways to write a layout", GOOD.len());
}

#[test]
fn layout_errors_mark_their_place_and_have_hints() {
    let mut shown = String::new();
    for written in BAD {
        let errors = Layout::parse_all(&[written]).expect_err(written);
        for error in errors {
            assert!(error.hint.is_some(), "{written}");
            let before = error.text[..error.span.start].chars().count();
            let marked = error.text[error.span.clone()].chars().count().max(1);
            shown.push_str(&format!(
                "  {}\n  {}{}\n{}\n= {}\n\n",
                error.text.replace(char::is_control, "\u{fffd}"),
                " ".repeat(before),
                "^".repeat(marked),
                error.message,
                error.hint.unwrap_or_default()
            ));
        }
    }
    println!("{} mistakes", BAD.len());
    insta::assert_snapshot!(shown);
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let errors = Layout::parse_all(&["3g40gb", "1g.10gb", "2g.20gb*0,1g.10gb:x"]).unwrap_err();
    let places: Vec<_> = errors.iter().map(|e| (e.item, e.span.start)).collect();
    assert_eq!(places, [(0, 0), (2, 7), (2, 17)]);
}

#[test]
fn empty_layout_has_a_hint() {
    let error = Layout::parse_list::<&str>(&[]).unwrap_err();
    assert!(error.hint.unwrap().contains("`none`"));
}

#[test]
fn profile_id_of_nvidia_smi_has_a_hint_with_the_right_form() {
    let errors = Layout::parse_all(&["19,19"]).unwrap_err();
    assert_eq!(errors.len(), 2);
    let hint = errors[0].hint.as_deref().unwrap();
    assert!(hint.contains("write the name of the profile, such as 1g.10gb; `gpushctl mig profiles` "), "{hint}");
}

#[test]
fn layout_names_and_entries_are_unambiguous() {
    for name in ["none", "dynamic", "train", "a100-mixed", "Half_2"] {
        assert_eq!(source_of(name), LayoutSource::Named(name.to_owned()));
    }
    for text in ["3g.40gb", "3g40gb", "3g.40gb,train", "", "@4", "train.x"] {
        assert!(matches!(source_of(text), LayoutSource::Entries(_)), "{text}");
    }
    for (written, _) in GOOD.iter().filter(|(_, canonical)| *canonical != NONE) {
        assert!(!is_name(written), "{written}");
    }
}

/// A layout that is too large gives a single short error, whatever its size.
#[test]
fn oversized_layout_gives_one_error() {
    let commas = ",".repeat(64_000);
    let entry = "1g.10gb".to_owned();
    let long = format!("1g.10gb+{}", "a".repeat(60_000));
    let too_large: &[(&str, Vec<String>, usize)] = &[
        ("commas", vec![commas], 0),
        ("entries in one text", vec![["1g.10gb"; MOST_IN_ALL + 1].join(",")], 0),
        ("texts", vec![entry.clone(); 16_000], MOST_IN_ALL),
        ("wrong texts", vec!["x".to_owned(); 16_000], MOST_IN_ALL),
        ("one long entry", vec![long], 0),
        ("two texts", vec!["1g.10gb,".repeat(50), "1g.10gb,".repeat(50)], 1),
    ];
    for (what, texts, item) in too_large {
        let errors = Layout::parse_all(texts).expect_err(what);
        assert_eq!((errors.len(), errors[0].item), (1, *item), "{what}: {}", errors[0]);
        assert!(errors[0].hint.as_deref().unwrap().contains("no GPU has room for so many"), "{what}");
        assert!(serde_json::to_string(&gpush_api::ApiError::from(errors[0].clone())).unwrap().len() < 1000, "{what}");
    }
    println!("{} layouts too large", too_large.len());

    let errors = Layout::parse_all(&["x,".repeat(MOST_IN_ALL - 1)]).unwrap_err();
    assert_eq!(errors.len(), MOST_IN_ALL);
    assert!(errors.iter().all(|error| std::sync::Arc::ptr_eq(&error.text, &errors[0].text)));
}

#[test]
fn largest_layout_is_accepted_and_one_more_instance_refused() {
    let most = vec!["1c.3g.40gb*8".to_owned(); 8];
    assert_eq!(Layout::parse_list(&most).unwrap().entries.len(), 8);
    let mut more = most;
    more.extend(["1g.10gb", "1g.10gb"].map(str::to_owned));
    let errors = Layout::parse_all(&more).unwrap_err();
    // The error is reported once, at the first entry above the maximum.
    assert_eq!((errors.len(), errors[0].item), (1, 8));
    assert_eq!(errors[0].message, "with this entry the layout has more than 64 instances");
    assert!(Layout::parse(&"1g.10gb*8,".repeat(3500)).is_err());

    assert!(Layout::parse("1g.10gb+me.all").is_ok());
    assert!(Layout::parse(&format!("1g.10gb+{}", "a".repeat(100))).is_err());
}

prop_compose! {
    fn any_entry()(
        slices in 1u8..=7,
        memory in 1u32..=999,
        suffix in prop::sample::select(vec!["", "+me", "-me", "+gfx", "+me.all"]),
        compute in prop::option::of(1u8..=7),
        start in prop::option::of(0u8..=15),
        count in 1u8..=8,
        shared in any::<bool>(),
    ) -> Entry {
        let compute_slices = compute.filter(|c| *c <= slices);
        Entry {
            compute_slices,
            profile: format!("{slices}g.{memory}gb{suffix}"),
            start,
            count: if start.is_some() && compute_slices.is_none_or(|c| c == slices) { 1 } else { count },
            share: shared.then_some(Share::Mps),
        }
    }
}

proptest! {
    #[test]
    fn canonical_layout_parses_back(entries in prop::collection::vec(any_entry(), 0..=MOST_IN_ALL / usize::from(MOST))) {
        let layout = Layout { entries };
        prop_assert_eq!(&Layout::parse(&layout.to_string()).unwrap(), &layout);
        prop_assert_eq!(&Layout::parse_list(&layout.canonical()).unwrap(), &layout);
    }

    #[test]
    fn garbage_is_refused_or_canonical(text in "\\PC{0,40}") {
        check(&text)?;
    }

    #[test]
    fn near_layouts_are_refused_or_canonical(text in "[0-9gcbxGBC.,@*: +meps-]{0,24}") {
        check(&text)?;
    }
}

fn check(text: &str) -> Result<(), TestCaseError> {
    match Layout::parse_all(&[text]) {
        Ok(layout) => prop_assert_eq!(Layout::parse(&layout.to_string()).unwrap(), layout),
        Err(errors) => {
            prop_assert!(!errors.is_empty());
            for error in errors {
                prop_assert!(error.text.get(error.span.clone()).is_some(), "{:?}", error);
                let _ = gpush_api::ApiError::from(error);
            }
        }
    }
    Ok(())
}

#[test]
fn only_valid_entries_with_the_suffix_share_devices() {
    for (entries, shares) in [
        (&["2g.20gb", "1c.3g.40gb@0*2:MPS"][..], true),
        (&["2g.20gb", "1g.10gb*2"], false),
        (&["none"], false),
        (&["halves"], false),
        (&["halves:mps"], false),
    ] {
        assert_eq!(Layout::shares_devices(entries), shares, "{entries:?}");
    }
}

/// Fault: the hint for `3g.40gb+2g.20gb` was `3g.40gb` alone, which destroys all other instances.
#[test]
fn layout_with_a_separator_of_another_tool_gets_commas() {
    for typed in ["3g.40gb+2g.20gb", "3g.40gb/2g.20gb", "3g.40gb;2g.20gb", "3g.40gb|2g.20gb"] {
        let error = Layout::parse(typed).unwrap_err();
        let hint = "separate the instances with commas: `3g.40gb,2g.20gb`";
        assert_eq!((error.hint.as_deref(), error.meant), (Some(hint), None), "{typed}");
    }
}
