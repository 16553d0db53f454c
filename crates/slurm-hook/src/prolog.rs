//! Prolog.
//!
//! ```text
//! nothing to do ─► 0
//! file `begun` ─► gpushd asked ─► granted: file with the environment ─► 0
//!                     │              └ file not written: lease ended ─► 1
//!                     ├─ refused: file with the reason ───────────────► 0
//!                     └─ no answer, broken: file removed, end noted ──► 0 or 1, by `gpush_core::slurm::decide`
//! ```

use gpush_api::{Code, SlurmDevice, SlurmJobStart, SlurmOutcome};
use gpush_core::{
    config::AgentDown,
    slurm::{
        Job,
        decide::{self, Concern, Started, Verdict},
        devices::is_owned,
        file::JobState,
        job_files::HookPlace,
        request::requested,
    },
};
use jiff::Timestamp;

use crate::{
    call::{Calls, Unanswered, end_of},
    directory::{FileWritten, PossibleLeases},
    hook_start::HookStart,
    mapping,
    options::Options,
    report::{fail, say_refused, sentence},
    settings::Settings,
    variable,
};

/// Runs Prolog. Returns its exit status.
#[must_use]
pub fn run(options: &Options) -> u8 {
    let job = match Job::read(variable) {
        Ok(job) => job,
        Err(error) => return fail(0, &error.to_string()),
    };
    let request = requested(&job);
    let settings = Settings::of_root(options);
    let directory = &settings.directory;
    // Most jobs need no GPU, so first check whether this job needs one.
    if matches!(request, Ok(None)) && !job.has_devices() {
        // TaskProlog must know this cluster and node even if their jobs have no file.
        directory.keep_place(&HookPlace::new(&job.cluster, &job.node));
        return 0;
    }
    let request = match request {
        Ok(request) => request,
        Err(error) => {
            let concern = Concern::of(false, true, job.has_devices());
            return refuse(&settings, &job, concern, &error.to_string(), Some(error.hint()));
        }
    };
    let found = mapping::found(&job, options.gres_conf.as_deref());
    let allocated: &[SlurmDevice] = found.as_deref().unwrap_or_default();
    let known_owned = directory.owned();
    // If the devices of the job are unknown, they may include a GPU that is reserved for Slurm.
    let owned = match &found {
        Ok(devices) => is_owned(devices, known_owned.as_deref(), settings.has_owner_slurm),
        Err(_) => settings.has_owner_slurm || known_owned.as_ref().is_some_and(|owned| !owned.is_empty()),
    };
    let has_gpushd = settings.has_config || known_owned.is_some();
    let concern = Concern::of(owned, request.is_some(), job.has_devices() && has_gpushd);
    if let Err(why) = &found {
        return match (owned && !why.is_refusal, concern) {
            (true, _) => fail(job.id, &format!("{}: {}", why.text, why.hint)),
            // Only this job cannot be served. Refuse it, so that the node stays in use.
            (false, Concern::Request | Concern::Gpus) => {
                refuse(&settings, &job, concern, &why.text, Some(why.hint.to_owned()))
            }
            (false, Concern::Nothing) => 0,
        };
    }
    let Some(uid) = job.uid else {
        return fail_with_gpus(concern, &job, "SLURM_JOB_UID is missing: Slurm must start this command");
    };
    let run = match directory.begin(&job, HookStart::of_this_process(job.id), PossibleLeases::All) {
        Ok(run) => run,
        Err(error) => return fail_with_gpus(concern, &job, &unwritable(&settings, &error)),
    };
    let has_request = request.is_some();
    let start = SlurmJobStart {
        cluster: job.cluster.clone(),
        job: job.id,
        node: job.node.clone(),
        uid,
        restart: job.begun_run(),
        leader: job.leader,
        name: job.name.clone(),
        account: job.account.clone(),
        request,
        devices: allocated.to_vec(),
        until_ms: Timestamp::now().as_millisecond(),
    };
    let mut calls = Calls::new(&settings).for_concern(concern);
    calls.deliver_ends(directory);
    let answer = calls.start(&start, || directory.is_current(&job, &run));
    // If gpushd does not know a device of the job, gres.conf is wrong, and the device may be reserved for Slurm.
    let is_wrong_gres_conf = matches!(&answer, Err(Unanswered::Error(error)) if error.code == Code::ConfigInvalid);
    let concern = if is_wrong_gres_conf { Concern::Gpus } else { concern };
    let (started, state, leases, error) = match answer {
        // Slurm no longer waits for this Prolog.
        Ok(None) => return 0,
        Ok(Some(answer)) => {
            directory.keep_owned(&answer.owned);
            // Before gpushd answered, it also ended the leases of earlier runs. So the ends of these runs need no
            // report.
            directory.end_delivered(&end_of(&job, job.begun_run()));
            match answer.outcome {
                SlurmOutcome::NotConcerned => (Started::NotConcerned, None, PossibleLeases::None, None),
                SlurmOutcome::Refused { reasons, hint } => {
                    (Started::Refused, Some(JobState::Refused { reasons, hint }), PossibleLeases::None, None)
                }
                SlurmOutcome::Granted { grant } => {
                    let state = JobState::Granted {
                        lease: grant.lease.id,
                        environment: grant.environment,
                        allocated: (!has_request).then_some(allocated.len()),
                        has_gres: job.has_devices(),
                    };
                    (Started::Granted, Some(state), PossibleLeases::All, None)
                }
            }
        }
        Err(Unanswered::NotSent(error)) => (Started::NoAnswer, None, PossibleLeases::Earlier, Some(error)),
        Err(Unanswered::NoAnswer(error)) => (Started::NoAnswer, None, PossibleLeases::All, Some(error)),
        Err(Unanswered::Error(error)) => (Started::Broken, None, PossibleLeases::All, Some(error)),
    };
    let verdict = decide::prolog(started, concern, settings.slurm.agent_down);
    let must_note = decide::must_note_end(started, concern, leases == PossibleLeases::All);
    // If the end is recorded, the next hook reports it to gpushd, so Epilog need not report the end.
    let is_noted = must_note && directory.note_end(&end_of(&job, job.begun_run())).is_ok();
    let leases = if is_noted { PossibleLeases::None } else { leases };
    let state = match (verdict, state) {
        (Verdict::Lease | Verdict::FailTasks, Some(state)) => state,
        (Verdict::FailTasks, None) => JobState::Refused {
            reasons: vec![error.map(|error| sentence(&error)).unwrap_or_default()],
            hint: Some("tell the administrator, or submit the job without a request to gpush".to_owned()),
        },
        (Verdict::Pass, _) if started == Started::NoAnswer && concern != Concern::Nothing => JobState::Passed,
        (Verdict::FailNode, _) => {
            directory.remove_run(&job, &run);
            let policy = match (started, settings.slurm.agent_down) {
                (Started::NoAnswer, AgentDown::Fail) => " (slurm.agent_down is \"fail\")",
                _ => "",
            };
            return fail(job.id, &format!("{}{policy}", error.map(|error| sentence(&error)).unwrap_or_default()));
        }
        (Verdict::Pass | Verdict::Lease, _) => {
            directory.remove_run(&job, &run);
            return 0;
        }
    };
    let refused = if let JobState::Refused { reasons, .. } = &state { Some(reasons.clone()) } else { None };
    match directory.write(&job, &run, state, leases) {
        Ok(FileWritten::Yes | FileWritten::Again) => {
            refused.inspect(|reasons| say_refused(job.id, reasons));
            0
        }
        Ok(FileWritten::Late) => {
            undo(&settings, &job);
            0
        }
        Err(error) => {
            undo(&settings, &job);
            directory.remove_run(&job, &run);
            fail_with_gpus(concern, &job, &unwritable(&settings, &error))
        }
    }
}

/// Makes Prolog fail only if the job has GPUs. If Prolog also failed for jobs that request a share but have no GPU,
/// users could drain the node with such jobs.
fn fail_with_gpus(concern: Concern, job: &Job, why: &str) -> u8 {
    match concern {
        Concern::Gpus => fail(job.id, why),
        Concern::Request | Concern::Nothing => 0,
    }
}

/// Records that the tasks of a job must fail. Does not need gpushd.
fn refuse(settings: &Settings, job: &Job, concern: Concern, reason: &str, hint: Option<String>) -> u8 {
    let directory = &settings.directory;
    let refused = JobState::Refused { reasons: vec![reason.to_owned()], hint };
    let leases = PossibleLeases::Earlier;
    let begun = directory.begin(job, HookStart::of_this_process(job.id), leases);
    match begun.and_then(|run| directory.write(job, &run, refused, leases)) {
        Ok(_) => {
            say_refused(job.id, &[reason.to_owned()]);
            0
        }
        Err(error) => fail_with_gpus(concern, job, &unwritable(settings, &error)),
    }
}

/// Ends the lease of a job, because its environment could not be written.
fn undo(settings: &Settings, job: &Job) {
    let end = end_of(job, job.begun_run());
    if Calls::new(settings).end(&end).is_err() {
        let _noted = settings.directory.note_end(&end);
    }
}

fn unwritable(settings: &Settings, error: &std::io::Error) -> String {
    format!("cannot write the file of the job in {}: {error}", settings.directory.path().display())
}
