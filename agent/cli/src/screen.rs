//! The screen of `mainstay status`: problems first, then the rest, in columns.

use std::fmt::Write;

use mainstay_proto::json::{ApiEnum, seconds};
use mainstay_proto::v1::process_exit::How;
use mainstay_proto::v1::{
    Component, HealthState, Job, JobPhase, Node, Rank, RankPhase, RecommendedAction, Saving, Server,
    ServerMode,
};
use prost_types::Timestamp;

use super::answer::{ServerReply, is_over};
use super::client::{AskError, Snapshot};
use super::output::{Paint, aligned, clean, shortened, spoken};
use super::ranks::{MAX_UNGROUPED_RANKS, folded, groups};

const MAX_COMMAND_CHARS: usize = 90;

/// What is shown in addition to the usual.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Shown {
    /// Jobs that are over.
    pub(super) over: bool,
    /// Each rank, however many there are.
    pub(super) ranks: bool,
}

/// All results, as text for a terminal: one block for each host.
pub(super) fn render(answers: &[ServerReply], paint: Paint, shown: Shown) -> String {
    let mut screen = String::new();
    let mut hosts: Vec<(&str, &str)> = Vec::new();
    for answer in answers {
        match &answer.result {
            Ok(snapshot) => {
                let Snapshot { server, node, .. } = snapshot;
                let host = (server.hostname.as_str(), server.boot_id.as_str());
                // A launcher does not monitor the host: below its agent, or another launcher, its jobs are enough.
                if hosts.contains(&host)
                    && node.components.is_empty()
                    && server.mode() == ServerMode::Launcher
                {
                    screen.pop();
                    jobs(snapshot, paint, shown, &mut screen);
                } else {
                    hosts.push(host);
                    host_of(snapshot, paint, &mut screen);
                    jobs(snapshot, paint, shown, &mut screen);
                }
            }
            Err(error) => {
                let dead = if matches!(error, AskError::Dead(_)) { "dead socket" } else { "no answer" };
                line(&mut screen, &format!("{}: {}", paint.warning(dead), clean(&error.to_string())));
            }
        }
        screen.push('\n');
    }
    screen
}

fn line(screen: &mut String, text: &str) {
    screen.push_str(text.trim_end());
    screen.push('\n');
}

fn host_of(snapshot: &Snapshot, paint: Paint, screen: &mut String) {
    let Snapshot { server, node, .. } = snapshot;
    let (state, name) = (node.state(), node.state().name());
    let senses = !node.components.is_empty() || server.mode() == ServerMode::Agent;
    let health = if senses { format!("  {}", paint.state(state, name)) } else { String::new() };
    line(
        screen,
        &format!("{}{health}  {}", paint.bold(&clean(&server.hostname)), paint.dim(&program(server))),
    );
    if senses && state != HealthState::Healthy {
        line(screen, &format!("  {}", clean(&node.reason)));
    }
    if let Some(error) = &server.journal_error {
        line(screen, &format!("  {}: {}", paint.warning("the journal cannot be written"), clean(error)));
    }
    components(node, server.time.as_ref(), paint, screen);
}

fn jobs(snapshot: &Snapshot, paint: Paint, wanted: Shown, screen: &mut String) {
    let Snapshot { server, jobs, .. } = snapshot;
    let (shown, hidden): (Vec<&Job>, Vec<&Job>) = jobs.iter().partition(|of| wanted.over || !is_over(of));
    for shown in &shown {
        screen.push('\n');
        job(shown, server.time.as_ref(), paint, wanted, screen);
    }
    match hidden.len() {
        0 if shown.is_empty() && server.mode() == ServerMode::Agent => line(screen, "\n  no jobs"),
        0 => {}
        over => {
            line(screen, &format!("\n  {}", paint.dim(&format!("{over} job(s) are over: --all shows them"))))
        }
    }
}

pub(super) fn program(server: &Server) -> String {
    let mode = server.mode().name().to_lowercase();
    let up = since(server.start_time.as_ref(), server.time.as_ref());
    let up = up.map(|up| format!(", up {up}")).unwrap_or_default();
    format!("{mode} {}, pid {}{up}", clean(&server.version), server.pid)
}

fn components(node: &Node, now: Option<&Timestamp>, paint: Paint, screen: &mut String) {
    let width = node.components.iter().map(|component| component.name.len()).max().unwrap_or(0);
    for component in &node.components {
        let state = component.state();
        let name = state.name();
        let state_cell = paint.state(state, &format!("{name:<9}"));
        let mut text =
            format!("  {:<width$}  {state_cell}  {}", clean(&component.name), clean(&component.reason));
        if let Some(age) = component.read_age.as_ref().map(seconds).filter(|_| state != HealthState::Healthy)
        {
            let _ = write!(text, " {}", paint.dim(&format!("(read {} ago)", spoken(age))));
        }
        if let Some(since) = since(component.since.as_ref(), now).filter(|_| state != HealthState::Healthy) {
            let _ = write!(text, " {}", paint.dim(&format!("(for {since})")));
        }
        line(screen, &text);
        attention(component, now, width, paint, screen);
        if state != HealthState::Healthy {
            evidence(component, width, paint, screen);
        }
    }
}

/// The actions of operators on it.
fn attention(
    component: &Component,
    now: Option<&Timestamp>,
    width: usize,
    paint: Paint,
    screen: &mut String,
) {
    let indent = " ".repeat(width + 4);
    if let Some(known) = &component.acknowledgement {
        let when = since(known.time.as_ref(), now).map(|ago| format!(" {ago} ago")).unwrap_or_default();
        let text = format!("acknowledged by user {}{when}: {}", known.uid, known.reason);
        line(screen, &format!("{indent}{}", paint.bold(&clean(&text))));
    }
    if let Some(silence) = &component.silence {
        let left =
            since(now, silence.until.as_ref()).map(|left| format!(" for {left} more")).unwrap_or_default();
        let text = format!("silenced by user {}{left}: {}", silence.uid, silence.reason);
        line(screen, &format!("{indent}{}", paint.bold(&clean(&text))));
    }
}

fn evidence(component: &Component, width: usize, paint: Paint, screen: &mut String) {
    let indent = " ".repeat(width + 4);
    for item in &component.evidence {
        let limit = item.limit.as_ref().map(|limit| format!(" (limit {limit})")).unwrap_or_default();
        let text = clean(&format!("{}: {}{limit}", item.source, item.reading));
        line(screen, &format!("{indent}{}", paint.dim(&text)));
    }
    if !matches!(component.recommended_action(), RecommendedAction::None | RecommendedAction::Unspecified) {
        let action = component.recommended_action().name();
        line(screen, &format!("{indent}recommended: {}", paint.bold(action)));
    }
}

fn saving(advised: &Saving) -> String {
    let Saving { every_s, was_s, cost, cost_was, .. } = advised;
    let costs = |cost: &f64| format!("{:.2} % of all time", cost * 100.0);
    let mut text = format!("every {every_s:.0} s costs least ({})", costs(cost));
    text.push_str(&format!("; as it is, every {was_s:.0} s, {}", costs(cost_was)));
    for tier in advised.tiers.iter().filter(|tier| tier.every_s > *every_s) {
        text.push_str(&format!("; {} every {:.0} s", clean(&tier.tier), tier.every_s));
    }
    text
}

/// What survives the loss of a host.
fn copies(job: &Job, now: Option<&Timestamp>, paint: Paint, screen: &mut String) {
    if let Some(copied) = &job.copied_step {
        let ago = since(copied.time.as_ref(), now).map_or(String::new(), |ago| format!(" ({ago} ago)"));
        line(screen, &format!("  copies:       step {} is on two hosts{ago}", copied.step));
    }
    if !job.copies_behind.is_empty() {
        line(screen, &format!("  {}", paint.bad(&clean(&job.copies_behind))));
    }
}

/// Restarts are always counted in the same way: "restart 1 of 3".
pub(super) fn restarts(job: &Job) -> String {
    match job.restarts {
        0 => format!("no restart of {}", job.max_restarts),
        used => format!("restart {used} of {}", job.max_restarts),
    }
}

fn job(job: &Job, now: Option<&Timestamp>, paint: Paint, wanted: Shown, screen: &mut String) {
    headline(job, now, paint, screen);
    details(job, now, paint, screen);
    if !job.ranks.is_empty() && !is_over(job) {
        let most = if wanted.ranks { usize::MAX } else { MAX_UNGROUPED_RANKS };
        let (shown, grouped) = folded(job, most);
        if !shown.is_empty() {
            ranks(&shown, paint, screen);
        }
        groups(&grouped).iter().for_each(|group| line(screen, &format!("  {group}")));
    }
}

fn headline(job: &Job, now: Option<&Timestamp>, paint: Paint, screen: &mut String) {
    let mut facts = vec![restarts(job)];
    facts.extend(job.step.map(|step| format!("step {step}")));
    facts.extend(job.steps_per_second.map(|rate| format!("{rate:.2} steps/s")));
    if !is_over(job) {
        facts.extend(since(job.start_time.as_ref(), now).map(|up| format!("for {up}")));
    }
    line(
        screen,
        &format!("job {}  {}  {}", paint.bold(&clean(&job.id)), phase(job, paint), facts.join(", ")),
    );
}

/// What there is to know of a job besides its ranks, the usual first.
pub(super) fn details(job: &Job, now: Option<&Timestamp>, paint: Paint, screen: &mut String) {
    let command = match job.texts_withheld {
        true => format!("(user {} and operators can see its command and its messages)", job.uid),
        false => shortened(&clean(&job.command.join(" ")), MAX_COMMAND_CHARS),
    };
    line(screen, &format!("  {}", paint.dim(&command)));
    if let (Some(total), Some(step)) = (job.total_steps, job.step)
        && !is_over(job)
    {
        let left = job.remaining.as_ref().map(|left| format!(", {} left", spoken(seconds(left))));
        line(screen, &format!("  progress:     step {step} of {total}{}", left.unwrap_or_default()));
    }
    if !job.run.is_empty() && !is_over(job) {
        line(screen, &format!("  run id:       {}", clean(&job.run)));
    }
    if let Some(reason) = &job.end_reason {
        line(screen, &format!("  {}", clean(reason)));
    }
    if !job.policy_trouble.is_empty() {
        line(screen, &format!("  {}", paint.bad(&clean(&job.policy_trouble))));
    }
    if let Some(advised) = job.saving.as_ref().filter(|_| !is_over(job)) {
        line(screen, &format!("  saving:       {}", saving(advised)));
    }
    if !job.leading_host.is_empty() && !is_over(job) {
        line(screen, &format!("  led by host:  {}", clean(&job.leading_host)));
    }
    if !job.incomplete.is_empty() && !is_over(job) {
        line(screen, &format!("  {}", paint.warning(&clean(&job.incomplete))));
    }
    if !job.waits_as_spare.is_empty() && !is_over(job) {
        line(screen, &format!("  {}", clean(&job.waits_as_spare)));
    }
    if !is_over(job) {
        copies(job, now, paint, screen);
    }
    if let Some(hang) = job.hang.as_ref().filter(|_| !is_over(job)) {
        line(screen, &format!("  {}", paint.bad(&clean(&hang.headline))));
    }
    if let Some(verdict) = &job.last_verdict {
        let sure = format!("{:.0} % sure", verdict.confidence * 100.0);
        let domain = verdict.domain().name();
        let class = verdict.fault_class.as_ref().map(|class| format!(", {class}")).unwrap_or_default();
        line(
            screen,
            &format!(
                "  last failure: {} {}",
                clean(&verdict.headline),
                paint.dim(&format!("({sure}; fault domain: {domain}{class})"))
            ),
        );
    }
    if let Some(decision) = &job.last_decision {
        let action = decision.action().name();
        line(screen, &format!("  decision:     {action}: {}", clean(&decision.why)));
    }
    for finding in job.findings.iter().filter(|_| !is_over(job)) {
        let sure = format!("({:.0} % sure)", finding.confidence * 100.0);
        line(
            screen,
            &format!("  {}: {} {}", paint.warning("finding"), clean(&finding.headline), paint.dim(&sure)),
        );
    }
}

pub(super) fn phase(job: &Job, paint: Paint) -> String {
    let name = job.phase().name();
    match (job.phase(), job.exit_status) {
        (JobPhase::Ended, Some(0)) => paint.good("ENDED (0)"),
        (JobPhase::Ended, Some(status)) => paint.bad(&format!("ENDED ({status})")),
        (JobPhase::Running, _) => paint.good(name),
        (JobPhase::Recovering | JobPhase::Stopping, _) => paint.warning(name),
        (JobPhase::Lost, _) => paint.bad(name),
        (JobPhase::Starting | JobPhase::Ended | JobPhase::Unspecified, _) => name.to_owned(),
    }
}

/// The column of the ranks' hosts, which only jobs of several hosts have.
const HOST_COLUMN: usize = 1;

fn ranks(ranks: &[&Rank], paint: Paint, screen: &mut String) {
    let header = ["RANK", "HOST", "LOCAL", "PID", "PHASE", "STEP", "SECTION", "HEARTBEAT", "LOSS"];
    let header = header.map(str::to_owned);
    let rows: Vec<[String; 9]> =
        std::iter::once(header).chain(ranks.iter().map(|rank| cells(rank))).collect();
    let has_hosts = ranks.iter().any(|rank| rank.host.is_some());
    let lines =
        aligned(&rows, |column| matches!(column, HOST_COLUMN | 4 | 6), (!has_hosts).then_some(HOST_COLUMN));
    for (place, text) in lines.iter().enumerate() {
        let text = &format!("  {text}");
        let rank = place.checked_sub(1).map(|place| ranks[place]);
        line(
            screen,
            &match rank.map(Rank::phase) {
                None => paint.dim(text),
                Some(RankPhase::Raised) => paint.bad(text),
                Some(_) => text.clone(),
            },
        );
        if let Some(refusal) = rank.and_then(|rank| rank.refusal.as_ref()) {
            line(
                screen,
                &format!("        {}", paint.warning(&format!("no heartbeats: {}", clean(refusal)))),
            );
        }
    }
}

fn cells(rank: &Rank) -> [String; 9] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let sections = rank.sections.iter().map(|section| clean(section)).collect::<Vec<_>>().join(" > ");
    [
        rank.rank.to_string(),
        or_dash(rank.host.as_deref().map(clean)),
        rank.local_rank.to_string(),
        rank.pid.to_string(),
        rank_phase(rank),
        or_dash(rank.step.map(|step| step.to_string())),
        or_dash(Some(shortened(&sections, 40)).filter(|sections| !sections.is_empty())),
        or_dash(rank.heartbeat_age.as_ref().map(|age| format!("{} ago", spoken(seconds(age))))),
        or_dash(rank.loss.map(|loss| format!("{loss:.4}"))),
    ]
}

fn rank_phase(rank: &Rank) -> String {
    let name = rank.phase().name().to_lowercase();
    match rank.exit.as_ref().and_then(|exit| exit.how.as_ref()) {
        Some(How::Code(code)) => format!("{name} ({code})"),
        Some(How::Signal(signal)) => match mainstay_model::entry::signal_name(*signal) {
            Some(signal) => format!("{name} ({signal})"),
            None => format!("{name} (signal {signal})"),
        },
        None => name,
    }
}

pub(super) fn since(start: Option<&Timestamp>, now: Option<&Timestamp>) -> Option<String> {
    let at = |time: &Timestamp| time.seconds as f64 + f64::from(time.nanos) / 1e9;
    Some(spoken(at(now?) - at(start?)))
}

#[cfg(test)]
mod tests {
    use mainstay_proto::v1::{DecidedAction, Decision, Evidence, FaultDomain, ProcessExit, Verdict};
    use prost_types::Duration;

    use super::super::find::SocketAt;
    use super::*;

    fn time(seconds: i64) -> Option<Timestamp> {
        Some(Timestamp { seconds, nanos: 0 })
    }

    fn snapshot() -> Snapshot {
        let memory = Component {
            name: "host.memory".into(),
            state: HealthState::Degraded.into(),
            reason: "processes wait for memory".into(),
            recommended_action: RecommendedAction::RestartProcess.into(),
            evidence: vec![Evidence {
                source: "/proc/pressure/memory".into(),
                reading: "full avg10=12.5 %".into(),
                limit: Some("10 %".into()),
                ..Evidence::default()
            }],
            read_age: Some(Duration { seconds: 2, nanos: 0 }),
            ..Component::default()
        };
        let cpu = Component {
            name: "host.cpu".into(),
            state: HealthState::Healthy.into(),
            reason: "2 processors, load 1.5".into(),
            ..Component::default()
        };
        let rank = |number: u32, phase: RankPhase, exit| Rank {
            rank: number,
            local_rank: number,
            pid: 4000 + i64::from(number),
            phase: phase.into(),
            exit,
            step: Some(412),
            sections: vec!["train".into(), "back\x1b[31mward".into()],
            heartbeat_age: Some(Duration { seconds: 0, nanos: 120_000_000 }),
            loss: Some(2.34567),
            ..Rank::default()
        };
        let job = Job {
            id: "demo".into(),
            phase: JobPhase::Recovering.into(),
            attempt: 1,
            restarts: 1,
            max_restarts: 3,
            step: Some(412),
            start_time: time(1000),
            command: vec!["python".into(), "train.py".into()],
            ranks: vec![
                rank(0, RankPhase::Connected, None),
                rank(1, RankPhase::Exited, Some(ProcessExit { how: Some(How::Signal(9)) })),
            ],
            last_verdict: Some(Verdict {
                headline: "rank 1 was killed by SIGKILL".into(),
                domain: FaultDomain::Unknown.into(),
                confidence: 0.6,
                ..Verdict::default()
            }),
            last_decision: Some(Decision {
                action: DecidedAction::RestartInJob.into(),
                why: "1 of 3 restarts used".into(),
                ..Decision::default()
            }),
            ..Job::default()
        };
        Snapshot {
            server: Server {
                mode: ServerMode::Agent.into(),
                version: "0.1.0".into(),
                pid: 812,
                hostname: "node-17".into(),
                start_time: time(0),
                time: time(1185),
                ..Server::default()
            },
            node: Node {
                state: HealthState::Degraded.into(),
                reason: "host.memory is DEGRADED: processes wait for memory".into(),
                components: vec![cpu, memory],
                ..Node::default()
            },
            jobs: vec![job],
        }
    }

    #[test]
    fn one_screen_shows_the_whole_state() {
        let place = SocketAt { socket: "/x".into(), job: None };
        let dead = ServerReply { place: place.clone(), result: Err(AskError::Dead("/run/old.sock".into())) };
        let text =
            render(&[ServerReply { place, result: Ok(snapshot()) }, dead], Paint::plain(), Shown::default());
        testing::snapshot!("status", "one screen", text);
    }

    fn reply(snapshot: Snapshot) -> ServerReply {
        ServerReply { place: SocketAt { socket: "/x".into(), job: None }, result: Ok(snapshot) }
    }

    #[test]
    fn jobs_that_are_over_are_counted_and_many_ranks_are_folded() {
        let mut snapshot = snapshot();
        let rank = snapshot.jobs[0].ranks[0].clone();
        snapshot.jobs[0].ranks = (0..64).map(|number| Rank { rank: number, ..rank.clone() }).collect();
        snapshot.jobs[0].ranks[7].step = Some(3);
        let mut over = snapshot.jobs[0].clone();
        (over.id, over.phase) = ("before".into(), JobPhase::Ended.into());
        snapshot.jobs.push(over);
        let usual = render(&[reply(snapshot.clone())], Paint::plain(), Shown::default());
        testing::snapshot!("status", "64 ranks and a job that is over", usual);
        let all = render(&[reply(snapshot)], Paint::plain(), Shown { over: true, ranks: true });
        assert!(all.contains("job before") && all.lines().count() > 64, "{all}");
    }

    #[test]
    fn a_host_is_shown_once_with_the_jobs_of_its_agent_and_its_launchers() {
        let of_agent = snapshot();
        let mut of_launcher = snapshot();
        of_launcher.server.mode = ServerMode::Launcher.into();
        of_launcher.node = Node::default();
        of_launcher.jobs[0].id = "other".into();
        let text = render(&[reply(of_agent), reply(of_launcher)], Paint::plain(), Shown::default());
        assert_eq!(text.matches("node-17").count(), 1, "{text}");
        assert!(text.contains("\njob demo") && text.contains("\njob other"), "{text}");
    }

    #[test]
    fn a_job_that_is_over_shows_no_ranks() {
        let mut snapshot = snapshot();
        snapshot.jobs[0].phase = JobPhase::Ended.into();
        snapshot.jobs[0].exit_status = Some(137);
        snapshot.jobs[0].end_reason = Some("no restarts left".into());
        let place = SocketAt { socket: "/x".into(), job: None };
        let text = render(
            &[ServerReply { place, result: Ok(snapshot) }],
            Paint::plain(),
            Shown { over: true, ranks: false },
        );
        assert!(text.contains("job demo  ENDED (137)  restart 1 of 3"), "{text}");
        assert!(text.contains("  no restarts left\n"), "{text}");
        assert!(!text.contains("RANK"), "{text}");
    }
}
