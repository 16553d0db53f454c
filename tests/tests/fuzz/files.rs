//! Files: the config, mig-parted files, and files of Slurm.

use gpush_core::{
    compute_policy,
    config::Config,
    parted,
    slurm::{
        GpuPlugin, GresConf, HostList, SlurmConf, environment::Job, file::JobFile, job_files::FileName, node_gres,
        numbering::Numbering, request::requested,
    },
};

use super::runner::{assert_bounded, fuzz};

/// Maximum length of a message about a file. It shows at most 50 problems, each with a part of a line.
const LONGEST_MESSAGE: usize = 128 << 10;

#[test]
fn config() {
    fuzz("config", |bytes| match Config::from_bytes(bytes, "/etc/gpush/config.toml") {
        Ok(config) => {
            let view = serde_json::to_vec(&config.view(None, &[])).unwrap();
            assert_bounded(view.len(), bytes, 64, 64 << 10);
        }
        Err(errors) => {
            let text = errors.to_string();
            assert!(!text.is_empty());
            assert!(text.len() <= LONGEST_MESSAGE, "{} bytes", text.len());
        }
    });
}

#[test]
fn mig_parted_files() {
    fuzz("mig_parted", |bytes| match parted::File::from_bytes_lenient(bytes, "config.yaml") {
        Ok((file, _)) => {
            let size = format!("{file:?}").len();
            assert_bounded(size, bytes, 2048, 64 << 10);
            let imported = format!("{:?}", parted::import(&file, None)).len();
            assert_bounded(imported, bytes, 2048, 64 << 10);
        }
        Err(errors) => assert!(errors.to_string().len() <= LONGEST_MESSAGE, "{errors}"),
    });
}

#[test]
fn slurm_files() {
    fuzz("slurm_files", |bytes| {
        let text = String::from_utf8_lossy(bytes);
        // Every included file is this file again, so the limit of the depth is tested too.
        let conf = SlurmConf::parse(&text, |_| (text.len() < 512).then(|| text.to_string()));
        let gres = conf.node_gres("n1").unwrap_or_default();
        let _ = conf.node_of_host("n1");
        assert!(node_gres(&gres).count() <= gres.len() + 1);
        match GresConf::parse(&text, "n1", |_| None) {
            Ok(gres_conf) => {
                assert!(gres_conf.gpus().len() <= 1 << 16, "{} devices", gres_conf.gpus().len());
                let _ = Numbering::of(gres_conf.ordered_by(&gres), Some(&gres), GpuPlugin::in_maps(&text));
            }
            Err(error) => assert!(error.to_string().len() < 4096, "{error}"),
        }
        if let Ok(list) = HostList::parse(&text) {
            assert!(!list.contains(""));
            if let Ok(names) = list.expand() {
                assert!(names.len() <= 1 << 14);
            }
        }
        assert!(compute_policy::levels(&text).len() <= text.len());
    });
}

#[test]
fn slurm_jobs() {
    fuzz("slurm_jobs", |bytes| {
        let text = String::from_utf8_lossy(bytes);
        if let Ok(file) = serde_json::from_slice::<JobFile>(bytes) {
            for visible in [None, Some("0,1")] {
                let prolog = file.task_prolog(visible);
                assert_bounded(prolog.text.len(), bytes, 4, 4096);
                let is_protocol =
                    |line: &str| ["export ", "unset ", "print "].iter().any(|word| line.starts_with(word));
                assert!(prolog.text.lines().all(is_protocol), "{}", prolog.text);
            }
            let printed = serde_json::to_vec(&file).unwrap();
            assert_eq!(serde_json::from_slice::<JobFile>(&printed).ok(), Some(file));
        }
        if let Some(name) = FileName::parse(&text) {
            assert_eq!(name.to_string(), text);
            assert!(!text.contains('/'));
        }
        // Each line of the input is a variable of the environment of a hook.
        let get =
            |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).map(str::to_owned);
        if let Ok(job) = Job::read(get) {
            assert!(job.gres.len() <= 1024 && job.visible.len() <= 1024);
            assert!(!job.file_name().to_string().contains('/'));
            if let Err(error) = requested(&job) {
                assert!(error.to_string().len() < 4096, "{error}");
            }
        }
    });
}
