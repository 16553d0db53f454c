use proptest::prelude::*;

use super::*;

fn parse(text: &str) -> GresConf {
    GresConf::parse(text, "n1", |path| (path == "gpus.conf").then(|| "Name=gpu File=/dev/nvidia[2-3]\n".to_owned()))
        .expect("a gres.conf")
}

fn files(conf: &GresConf) -> Vec<&str> {
    conf.gpus().iter().map(|gpu| gpu.file.as_str()).collect()
}

fn minors(conf: &GresConf) -> Vec<u32> {
    conf.gpus().iter().filter_map(GresDevice::minor).collect()
}

fn problem(text: &str) -> (usize, GresProblem) {
    let error = GresConf::parse(text, "n1", |path| (path == "loop").then(|| "Include loop".to_owned()));
    let error = error.expect_err(text);
    (error.place.line, error.problem)
}

#[test]
fn index_counts_devices_not_minors() {
    let conf = parse("AutoDetect=off\nName=gpu Type=h200 File=/dev/nvidia[2-3]\n");
    let gpu = conf.gpu(0).expect("a GPU");
    assert_eq!((gpu.file.as_str(), gpu.minor()), ("/dev/nvidia2", Some(2)));
    assert_eq!(gpu.gres_type.as_deref(), Some("h200"));
    assert_eq!(conf.gpu(1).and_then(GresDevice::minor), Some(3));
    assert_eq!(conf.gpu(2), None);
    assert_eq!(conf.auto_detect, Some(AutoDetect::Off));
}

#[test]
fn order_is_the_order_of_the_file() {
    assert_eq!(minors(&parse("Name=gpu File=/dev/nvidia[2-3]\nName=gpu File=/dev/nvidia[1,0]")), [2, 3, 1, 0]);
    assert_eq!(minors(&parse("Name=gpu File=/dev/nvidia3,/dev/nvidia[0-1]")), [3, 0, 1]);
    assert_eq!(minors(&parse("include gpus.conf\nName=gpu File=/dev/nvidia[0-1]")), [2, 3, 0, 1]);
}

#[test]
fn types_follow_the_order_of_slurm_conf() {
    let text = "Name=gpu Type=b File=/dev/nvidia3\nName=gpu Type=a File=/dev/nvidia[0-1]\n\
                Name=gpu Type=b File=/dev/nvidia2";
    assert_eq!(minors(&parse(text).ordered_by("gpu:a:2,gpu:b:2")), [0, 1, 3, 2]);
    assert_eq!(minors(&parse(text).ordered_by("gpu:b:2(S:0-1),gpu:a:2(S:0)")), [3, 2, 0, 1]);
    assert_eq!(minors(&parse(text).ordered_by("gpu:4,mps:400")), [3, 0, 1, 2]);
    assert_eq!(minors(&parse(text).ordered_by("gpu:a:1,gpu:b")), [0, 3]);
    assert_eq!(minors(&parse(text).ordered_by("gpu:3")), [3, 0, 1]);
    assert_eq!(minors(&parse(text).ordered_by("shard:4")), [3, 0, 1, 2]);
}

/// slurmd 22.05 listed `/dev/nvidia2` first for `Gres=gpu:A:2,gpu:b:2` and these lines.
#[test]
fn types_ignore_case() {
    let text = "Name=gpu Type=b File=/dev/nvidia[0-1]\nName=gpu Type=a File=/dev/nvidia[2-3]";
    assert_eq!(minors(&parse(text).ordered_by("gpu:A:2,gpu:b:2")), [2, 3, 0, 1]);
    assert_eq!(minors(&parse("Name=gpu Type=a100 File=/dev/nvidia[0-3]").ordered_by("gpu:A100:4")), [0, 1, 2, 3]);
}

#[test]
fn keys_and_names_ignore_case() {
    let conf = parse("NAME=gpu fIlE=/dev/nvidia0 # not this: Name=gpu\n\nname=GPU File=/dev/nvidia1\n");
    assert_eq!(files(&conf), ["/dev/nvidia0", "/dev/nvidia1"]);
    assert_eq!(conf.records.len(), 2);
    assert_eq!(
        parse("Name=\"gpu\" \\\n  File = /dev/nvidia0 Flags=nvidia_gpu_env,x Cores=0-3").records,
        [GresRecord {
            name: "gpu".to_owned(),
            gres_type: None,
            files: vec!["/dev/nvidia0".to_owned()],
            multiple_files: false,
            count: 1,
            cores: Some("0-3".to_owned()),
            flags: vec!["nvidia_gpu_env".to_owned(), "x".to_owned()],
            unique_id: None,
            place: Position { included: None, line: 1 },
        }]
    );
}

#[test]
fn lines_of_other_nodes_are_left_out() {
    let text = "NodeName=n[1-2],m Name=gpu File=/dev/nvidia1\nNodeName=n[3-4] Name=gpu File=/dev/nvidia5\n\
                NodeName=n2 AutoDetect=nvml\nAutoDetect=nvml\nNodeName=n1 AutoDetect=off\nName=gpu File=/dev/nvidia0";
    let conf = parse(text);
    assert_eq!(minors(&conf), [1, 0]);
    assert_eq!(conf.auto_detect, Some(AutoDetect::Off));
    let conf = GresConf::parse(text, "n2", |_| None).expect("a gres.conf");
    assert_eq!(conf.auto_detect, Some(AutoDetect::Nvml));
}

#[test]
fn mig_device_has_the_files_of_its_capabilities() {
    let caps = "/dev/nvidia-caps/nvidia-cap21,/dev/nvidia-caps/nvidia-cap22";
    let conf = parse(&format!(
        "Name=gpu Type=1g.10gb MultipleFiles=/dev/nvidia0,{caps} UniqueId=MIG-1 Count=1\nName=gpu File=/dev/nvidia1"
    ));
    let mig = conf.gpu(0).expect("a MIG device");
    assert_eq!(mig.files.len(), 3);
    assert_eq!((mig.minor(), mig.unique_id.as_deref()), (Some(0), Some("MIG-1")));
    assert_eq!(conf.gpu(1).and_then(GresDevice::minor), Some(1));
}

/// The records of two MIG devices of one GPU both contain the device file of the GPU. The records
/// are not duplicates.
#[test]
fn only_equal_lists_of_files_are_duplicates() {
    parse("Name=gpu MultipleFiles=/dev/nvidia0,/dev/cap1\nName=gpu MultipleFiles=/dev/nvidia0,/dev/cap2");
    let (line, problem) = problem("\nName=gpu File=/dev/nvidia0\nName=gpu File=/dev/nvidia[0-1]");
    assert_eq!(line, 3);
    assert!(matches!(problem, GresProblem::Duplicate { .. }), "{problem}");
}

#[test]
fn mps_counts_shares_of_its_gpu() {
    let conf = parse("Name=gpu File=/dev/nvidia0\nName=mps Count=100 File=/dev/nvidia0\nName=shard Count=16");
    assert_eq!(conf.records.iter().map(|record| record.count).collect::<Vec<_>>(), [1, 100, 16]);
    assert_eq!(conf.gpus().len(), 1);
}

#[test]
fn unknown_keys_are_kept_for_a_report() {
    let conf = parse("Name=gpu File=/dev/nvidia0 Links=-1 Colour=red");
    assert_eq!(conf.unknown_keys.iter().map(|unknown| unknown.key.as_str()).collect::<Vec<_>>(), ["Colour"]);
}

#[test]
fn problems_have_their_line_and_cause() {
    for (text, line, expected) in [
        ("\nFile=/dev/nvidia0", 2, "the line begins with `File`, not with Name, NodeName or AutoDetect"),
        ("Name=gpu File", 1, "`File` is not a `Key=Value` pair"),
        ("NodeName=n1 File=/dev/nvidia0", 1, "the line has no Name"),
        ("Name=gpu \\\nFile=/dev/nvidia[3-0]", 1, "File: `3-0` is not a range such as `0-3`"),
        ("NodeName=n[1 Name=gpu", 1, "NodeName: `n[1` has an unmatched bracket"),
        ("Name=gpu File=/a MultipleFiles=/b", 1, "File and MultipleFiles exclude each other"),
        ("Name=gpu Count=x", 1, "`x` is not a count such as `4` or `10G`"),
        ("Name=gpu File=/a[0-3] Count=4K", 1, "Count is 4096, but the line has 4 device files"),
        ("#\nInclude nothing.conf", 2, "cannot read the included file `nothing.conf`"),
        ("Include loop", 1, "`loop` cannot be included: files include each other, or too many files are included"),
    ] {
        let (at, problem) = problem(text);
        assert_eq!((at, problem.to_string().as_str()), (line, expected), "{text}");
    }
}

proptest! {
    /// In a file that lists minor numbers in any order, index i is the i-th minor number.
    #[test]
    fn index_maps_to_the_written_minor(
        minors in Just((0..16u32).collect::<Vec<_>>()).prop_shuffle(),
        cuts in prop::collection::vec(1..5usize, 16),
        comments in any::<bool>(),
    ) {
        let (mut text, mut rest, mut cuts) = (String::new(), &minors[..], cuts.into_iter());
        while !rest.is_empty() {
            let (now, after) = rest.split_at(cuts.next().unwrap_or(1).min(rest.len()));
            let list: Vec<_> = now.iter().map(u32::to_string).collect();
            text += &format!("Name=gpu File=/dev/nvidia[{}]{}\n", list.join(","), if comments { " # x" } else { "" });
            rest = after;
        }
        let conf = parse(&text);
        for (index, minor) in (0..).zip(&minors) {
            prop_assert_eq!(conf.gpu(index).and_then(GresDevice::minor), Some(*minor));
        }
    }

    #[test]
    fn arbitrary_text_never_panics(text in "((Name|File|NodeName|Count|Include|AutoDetect)[ =]?[a-z0-9\\[\\],\\\\#\"-]{0,8}[ \n]?){0,12}") {
        if let Ok(conf) = GresConf::parse(&text, "n1", |_| None) {
            let _ = conf.ordered_by(&text);
        }
    }
}
