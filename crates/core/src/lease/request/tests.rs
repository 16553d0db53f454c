use gpush_api::{LeaseKind, Percentage, Priority};
use proptest::prelude::*;

use super::*;

fn share(text: &str) -> LeaseShare {
    parse(text).unwrap_or_else(|error| panic!("{text}: {error}")).share
}

fn flags(terms: &[(Key, Option<&str>)]) -> Result<LeaseRequest, RequestError> {
    let terms: Vec<Term<'_>> = terms.iter().map(|(key, value)| Term { key: *key, value: *value }).collect();
    build(&terms, Spelling::Flags)
}

#[test]
fn spec_terms_become_typed_shares() {
    let mps = |percentage: &str, mib: Option<u64>, priority: Option<Priority>| LeaseShare::Mps {
        percentage: percentage.parse::<Percentage>().ok(),
        memory_limit_mib: mib.and_then(MemoryLimit::of_mib),
        priority,
    };
    assert_eq!(share("mps=25,memory=8G"), mps("25", Some(8192), None));
    assert_eq!(share("memory=8G , mps = 12.5%"), mps("12.5", Some(8192), None));
    assert_eq!(share("mps"), mps("", None, None));
    assert_eq!(share("priority=below-normal,mps"), mps("", None, Some(Priority::BelowNormal)));
    assert_eq!(share("mig=1g.10gb"), LeaseShare::MigProfile { profile: "1g.10gb".to_owned() });
    assert_eq!(share("mig=1G.10GB+ME"), LeaseShare::MigProfile { profile: "1g.10gb+me".to_owned() });
    assert_eq!(share("memory=10G"), LeaseShare::MigSize { memory_mib: Some(10240), slices: None });
    assert_eq!(share("slices=2"), LeaseShare::MigSize { memory_mib: None, slices: Some(2) });
    assert_eq!((share("timeslice"), share("whole")), (LeaseShare::Timeslice {}, LeaseShare::Whole {}));
}

#[test]
fn flags_take_gpus_count_and_times() {
    let request = flags(&[
        (Key::Whole, None),
        (Key::Gpu, Some("0-3")),
        (Key::Gpu, Some("*H100*")),
        (Key::Count, Some("2")),
        (Key::For, Some("1h30m")),
        (Key::Wait, Some("30s")),
    ])
    .unwrap();
    assert_eq!((request.gpus.len(), request.count, request.duration_s), (2, 2, Some(5400)));
    assert_eq!(request.wait, LeaseWait::Seconds(30));
    assert_eq!(spec(&request), "whole,gpu=0-3,gpu=*H100*,count=2,for=1h30m,wait=30s");
    assert_eq!(flags(&[(Key::Wait, None)]).unwrap().wait, LeaseWait::Unlimited);
    assert_eq!(flags(&[]).unwrap().share, LeaseShare::Default {});
}

#[test]
fn wrong_spec_names_the_term_and_an_example() {
    let cases = [
        ("", "the request has an empty entry", "write a request such as mps=25,memory=8G"),
        ("mps=25,", "the request has an empty entry", "write a request such as mps=25,memory=8G"),
        ("msp=25", "`msp` is not a key of a request", "did you mean `mps`?"),
        ("foo", "`foo` is not a key of a request", "the keys are mig, mps, timeslice, whole, memory, slices, priority"),
        ("MPS=25", "`MPS` is not a key of a request", "did you mean `mps`?"),
        (
            "mps=0",
            "`mps`: `0` is not valid: the percentage must be more than 0 and at most 100",
            "write for example `mps=25`",
        ),
        (
            "mps=101",
            "`mps`: `101` is not valid: the percentage must be more than 0 and at most 100",
            "write for example `mps=25`",
        ),
        (
            "mps=-5",
            "`mps`: `-5` is not valid: write a number that is more than 0 and at most 100",
            "write for example `mps=25`",
        ),
        ("mps=", "`mps` needs a value", "write for example `mps=25`"),
        ("mig", "`mig` needs a value", "write for example `mig=1g.10gb`"),
        ("whole=1", "`whole` takes no value", "write `whole` alone"),
        ("mps=25,mps=25", "`mps` is given twice", "give `mps` once"),
        ("mps=25,whole", "`mps` and `whole` exclude each other", "give `mps` or `whole`"),
        ("mps=25,slices=2", "`slices` does not apply to `mps`", "leave out `slices`"),
        ("mig=1g.10gb,memory=8G", "`memory` does not apply to `mig`", "leave out `memory`"),
        ("priority=normal", "`priority` needs `mps`", "leave out `priority`"),
        ("memory=8", "`memory`: `8` is not valid: add the unit: 8G or 8192M", "write for example `memory=8G`"),
        (
            "mig=3g",
            "`mig`: `3g` is not valid: write a profile name, such as 1g.10gb or 1c.3g.40gb",
            "write the memory too, such as `mig=3g.40gb`; `gpushctl mig profiles` lists the profiles",
        ),
        (
            "slices=0",
            "the number of compute slices must be 1 or more",
            "write 1 or more slices, or leave the number of slices out",
        ),
        ("slices=300", "`slices`: `300` is not valid: no GPU has that many slices", "write for example `slices=2`"),
        ("gpu=0", "`gpu` is not allowed in a Slurm request", "use Slurm's --gres; Slurm chooses the GPUs"),
        (
            "for=2h",
            "`for` is not allowed in a Slurm request",
            "use Slurm's --time for a time limit; Slurm queues the job without an option",
        ),
        (
            "mig=big",
            "`mig`: `big` is not valid: write a profile name, such as 1g.10gb or 1c.3g.40gb",
            "write for example `mig=1g.10gb`",
        ),
    ];
    for (text, message, hint) in cases {
        let error = parse(text).unwrap_err();
        assert_eq!((error.to_string().as_str(), error.hint().as_str()), (message, hint), "{text}");
    }
}

/// Flags with their values.
type Given<'a> = &'a [(Key, Option<&'a str>)];

#[test]
fn wrong_flag_is_named_as_it_is_typed() {
    let cases: [(Given<'_>, &str, &str); 8] = [
        (
            &[(Key::Mps, Some("101"))],
            "`--mps`: `101` is not valid: the percentage must be more than 0 and at most 100",
            "`--mps 25`",
        ),
        // Fault: the hint was a constant example, without the number and the start.
        (&[(Key::Mig, Some("1g.10gb*2"))], "`--mig`: `1g.10gb*2` is not valid", "`--mig 1g.10gb --count 2`"),
        (&[(Key::Mig, Some("1g.10gb@3"))], "`--mig`: `1g.10gb@3` is not valid", "`--target GPU:1g.10gb@3`"),
        (&[(Key::For, Some("0"))], "`--for`: `0` is not valid: the duration must be longer than 0", "`--for 2h`"),
        (&[(Key::For, Some("-2h"))], "`--for`: `-2h` is not valid", "`--for 2h`"),
        (&[(Key::Wait, Some("99999999999999999999s"))], "`--wait`: ", "`--wait=5m`"),
        (&[(Key::Count, Some("0")), (Key::Whole, None)], "the count 0 is not possible", "request 1 to 64"),
        (
            &[(Key::Count, Some("2")), (Key::Mps, Some("25"))],
            "a lease of kind mps has only one share, so it takes no count",
            "one lease for each",
        ),
    ];
    for (terms, message, hint) in cases {
        let error = flags(terms).unwrap_err();
        assert!(error.to_string().starts_with(message), "{error}");
        assert!(error.hint().contains(hint), "{}", error.hint());
    }
}

/// Fault: the hint for `--memory 39.5G` was `--memory 10G`.
#[test]
fn memory_with_a_fraction_is_hinted_in_mib() {
    for (typed, hint) in [
        ("39.5G", "write whole MiB: `--memory 40448M`"),
        ("0.25GiB", "write whole MiB: `--memory 256M`"),
        ("1.x", "write for example `--memory 10G`"),
    ] {
        assert_eq!(flags(&[(Key::Memory, Some(typed))]).unwrap_err().hint(), hint, "{typed}");
    }
}

#[test]
fn hostile_spec_is_refused_with_a_short_plain_message() {
    let long = format!("mps=25,memory={}", "9".repeat(20_000));
    let many = "mps=25,".repeat(3000);
    for text in [
        long.as_str(),
        many.as_str(),
        "mps=25\n",
        "mps=25\nmem=8G",
        "mps=$(reboot)",
        "$(reboot)",
        "mps=25;reboot",
        "mps=`id`",
        "mig=1g.10gb\u{202e}",
        "mig=../../etc",
        "mig=1g.10gb --gpu 3",
        "mps=２５",
        "memory=8Ｇ",
        "\u{1b}[31mmps",
        "mps=25,\u{0}",
        "=",
        "mps==25",
        "mig=1g.10gb\0",
    ] {
        let error = parse(text).unwrap_err();
        let all = format!("{error} {}", error.hint());
        assert!(all.chars().all(|c| !c.is_control() && c != '\u{202e}'), "{all:?}");
        assert!(all.len() < 300, "{all}");
        let _ = gpush_api::ApiError::from(error);
    }
}

#[test]
fn job_comment_without_a_request_is_ignored() {
    for text in
        ["", "train llama", "mps25", "uses mps", "gpush", "see gpush: docs later".trim_end_matches(':'), "x,mps"]
    {
        if !text.contains("gpush:") {
            assert_eq!(from_comment(text), Ok(None), "{text}");
        }
    }
    for text in ["mps", " mps-per-gpu\n"] {
        assert_eq!(from_comment(text).unwrap().unwrap().share.kind(), Some(LeaseKind::Mps), "{text}");
    }
    let found = from_comment("epoch 3\ngpush:mps=25,memory=8G $(rm -rf /)").unwrap().unwrap();
    assert_eq!(spec(&found), "mps=25,memory=8G");
    assert_eq!(from_comment("gpush:mps gpush:whole"), Err(RequestError::SeveralInComment));
    assert!(from_comment("gpush:").is_err() && from_comment("gpush:mpss=3").is_err());
    // Fault: the second term was ignored, so the job got no memory limit.
    let expected = parse("mps=25,memory=8G").unwrap();
    for text in [
        "gpush:mps=25, memory=8G",
        "gpush:mps=25 ,memory=8G",
        "gpush: mps=25 , memory=8G",
        "note, GPUSH:mps=25,memory=8G",
        "Gpush:mps=25,memory=8G and more",
    ] {
        assert_eq!(from_comment(text), Ok(Some(expected.clone())), "{text}");
    }
}

/// Fault: the comment was ignored, and the job ran with the whole GPU.
#[test]
fn misspelt_request_in_a_comment_is_refused() {
    for (text, spec) in [
        ("mps=25", "mps=25"),
        (" mig=1g.10gb ", "mig=1g.10gb"),
        ("gpus:mps=25", "mps=25"),
        ("run 7, gpush=mps=25, urgent", "mps=25"),
        ("gpsuh:timeslice", "timeslice"),
        ("gpush mps=25,memory=8G", "mps=25,memory=8G"),
        ("gpu:mps=25", "mps=25"),
    ] {
        let error = from_comment(text).unwrap_err();
        assert_eq!(error, RequestError::MisspeltInComment { spec: spec.to_owned() }, "{text}");
        assert!(error.hint().ends_with(&format!("--comment=gpush:{spec}")), "{}", error.hint());
    }
    for text in ["mps=fast", "gpu=1", "gpush", "push:later", "mps=25 of the cluster", "gpus: 4", "whole", "key=mps=25"]
    {
        assert_eq!(from_comment(text), Ok(None), "{text}");
    }
}

#[test]
fn request_without_share_takes_the_only_kind_offered() {
    for kind in LeaseKind::ALL {
        assert_eq!(default_share(&[kind, kind]).unwrap().kind(), Some(kind));
    }
    let error = default_share(&[LeaseKind::Whole, LeaseKind::Mig]).unwrap_err();
    assert_eq!(error.to_string(), "the request must name a kind of lease: the GPUs offer mig, whole");
    assert_eq!(error.hint(), "add --memory 10G or --whole");
    assert!(default_share(&[]).is_err());
}

#[test]
fn json_request_outside_its_limits_is_refused() {
    let good = LeaseRequest::default();
    let share = |share| LeaseRequest { share, ..LeaseRequest::default() };
    for bad in [
        LeaseRequest { count: 65, ..good.clone() },
        LeaseRequest { duration_s: Some(u64::MAX), ..good.clone() },
        LeaseRequest { duration_s: Some(0), ..good.clone() },
        LeaseRequest { wait: LeaseWait::Seconds(u64::MAX), ..good.clone() },
        LeaseRequest { gpus: vec!["$(id)".to_owned()], ..good.clone() },
        LeaseRequest { gpus: vec!["0".to_owned(); 300], ..good.clone() },
        LeaseRequest { count: 2, ..share(LeaseShare::Timeslice {}) },
        share(LeaseShare::MigSize { memory_mib: Some(0), slices: None }),
        share(LeaseShare::MigSize { memory_mib: Some(u64::MAX), slices: None }),
        share(LeaseShare::MigProfile { profile: "1g.10gb;id".to_owned() }),
        share(LeaseShare::MigProfile { profile: "g.".repeat(40) }),
    ] {
        let error = check(&bad).unwrap_err();
        assert!(!error.to_string().is_empty() && !error.hint().is_empty());
    }
    assert_eq!(check(&good), Ok(()));
}

fn any_share() -> impl Strategy<Value = LeaseShare> {
    let memory = proptest::option::of(1..(16_u64 << 20));
    prop_oneof![
        Just(LeaseShare::Default {}),
        Just(LeaseShare::Whole {}),
        Just(LeaseShare::Timeslice {}),
        "[1-7]g\\.[1-9][0-9]{0,2}gb(\\+me)?".prop_map(|profile| LeaseShare::MigProfile { profile }),
        (1..(16_u64 << 20), proptest::option::of(1..8_u8))
            .prop_map(|(mib, slices)| LeaseShare::MigSize { memory_mib: Some(mib), slices }),
        (proptest::option::of(1..=1000_u16), memory, proptest::option::of(0..2_u32)).prop_map(
            |(tenths, mib, priority)| LeaseShare::Mps {
                percentage: tenths.and_then(Percentage::of_tenths),
                memory_limit_mib: mib.and_then(MemoryLimit::of_mib),
                priority: priority.and_then(Priority::of_number),
            }
        ),
    ]
}

proptest! {
    #[test]
    fn request_text_reads_back_as_the_same_request(share in any_share(), count in 1..64_u32, seconds in 1..1_000_000_u64) {
        let single = matches!(share.kind(), Some(LeaseKind::Mps | LeaseKind::Timeslice));
        let request = LeaseRequest {
            share,
            count: if single { 1 } else { count },
            duration_s: Some(seconds),
            wait: LeaseWait::Seconds(seconds),
            gpus: vec!["0-3".to_owned()],
            ..LeaseRequest::default()
        };
        let text = spec(&request);
        let terms: Vec<Term<'_>> = text
            .split(',')
            .map(|term| match term.split_once('=') {
                Some((key, value)) => Term { key: Key::parse(key).unwrap(), value: Some(value) },
                None => Term { key: Key::parse(term).unwrap(), value: None },
            })
            .collect();
        prop_assert_eq!(build(&terms, Spelling::Flags).unwrap(), request.clone());
        let json = serde_json::to_string(&request).unwrap();
        prop_assert_eq!(serde_json::from_str::<LeaseRequest>(&json).unwrap(), request);
    }

    /// An accepted request contains no free text of the user: each value is typed, or has the form
    /// of a name.
    #[test]
    fn parsed_requests_always_pass_the_check(text in "(mps|mig|memory|slices|priority|whole|[a-z]{1,4}|.{0,5})(=.{0,12})?(,(memory|mps)=.{0,8})?") {
        if let Ok(request) = parse(&text) {
            prop_assert!(check(&request).is_ok());
            let plain = |c: char| c.is_ascii_alphanumeric() || ".,=+-%".contains(c);
            prop_assert!(spec(&request).chars().all(plain), "{}", spec(&request));
        }
        let _ = from_comment(&text);
        let _ = from_comment(&format!("gpush:{text}"));
    }
}
