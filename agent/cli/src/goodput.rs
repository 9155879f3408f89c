//! `mainstay goodput`: where the time of jobs went, from the run directories, a journal or a server.

mod launches;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::ValueEnum;
use mainstay_app::default_paths;
use mainstay_model::time::Wall;
use mainstay_proto::v1::Job;
use mainstay_view::convert::books::books;
use mainstay_view::goodput::google;
use mainstay_view::goodput::report::{self, GroupBy, JobAccount, Options};

use super::client::Client;
use super::find::agent_over_tcp;
use super::output::{Form, Structured};
use super::when::When;
use super::{exit, output};
use launches::{Launches, Run};

/// Show what the time of jobs was spent on: goodput, lost work and what caused it
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay goodput                      all jobs whose run directories are here
  mainstay goodput exp-7                one job, over all its launches
  mainstay goodput --since 24h --by cause     what was lost in the last day, by cause
  mainstay goodput --since 7d --by host --price 2.5     with the price of a device for an hour
  mainstay goodput --csv > goodput.csv
  mainstay goodput --journal /var/lib/mainstay/journal  all jobs of a host, from its agent's journal
  mainstay goodput --host node-7                        the jobs that an agent knows
  mainstay goodput exp-7 --ml-goodput > exp-7.jsonl     for Google's calculator

Exit status: 0 shown, 3 there is no such job, or nothing answers, 64 the command line was not understood.")]
pub(super) struct Args {
    /// Jobs: names, run directories, or runs (NAME~ID); all of them if none is given
    #[arg(value_name = "JOB")]
    jobs: Vec<String>,
    /// A job, as an option; may be given several times
    #[arg(long = "job", value_name = "JOB")]
    more_jobs: Vec<String>,
    /// Only the time since then: how long ago (24h, 7d), or a time (2026-11-29T12:00)
    #[arg(long, value_name = "TIME", conflicts_with_all = ["socket", "host"])]
    since: Option<When>,
    /// Only the time until then
    #[arg(long, value_name = "TIME", conflicts_with_all = ["socket", "host"])]
    until: Option<When>,
    /// Show what was lost in groups
    #[arg(long, value_enum)]
    by: Option<By>,
    /// The price of a device (a rank) for an hour, in any currency
    #[arg(long, value_name = "NUMBER", value_parser = price)]
    price: Option<f64>,
    /// Read the run directories in this directory
    #[arg(long, value_name = "DIR", conflicts_with_all = ["journal", "socket", "host"])]
    log_dir: Option<PathBuf>,
    /// Read the journal in this directory, with all its jobs
    #[arg(long, value_name = "DIR", conflicts_with_all = ["socket", "host"])]
    journal: Option<PathBuf>,
    /// Ask the server on this socket
    #[arg(long, value_name = "PATH", conflicts_with = "host")]
    socket: Option<PathBuf>,
    /// Ask the agent of this host over TCP; port 7130 if none is given
    #[arg(long, value_name = "HOST[:PORT]", value_parser = agent_over_tcp)]
    host: Option<PathBuf>,
    #[command(flatten)]
    form: Form,
    /// Print a row for each state and cause of each job, as comma-separated values
    #[arg(long, conflicts_with_all = ["json", "output"])]
    csv: bool,
    /// Print the log that Google's ml-goodput-measurement would have written, one JSON object per line
    #[arg(long, conflicts_with_all = ["json", "output", "csv", "by", "price", "socket", "host", "since", "until"])]
    ml_goodput: bool,
    /// Show what ml-goodput-measurement shows of a log that it wrote, and nothing else
    #[arg(long, value_name = "FILE", exclusive = true)]
    read_ml_goodput: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum By {
    Job,
    Host,
    User,
    Cause,
}

fn price(text: &str) -> Result<f64, String> {
    let price = text.parse().ok().filter(|price: &f64| price.is_finite() && *price >= 0.0);
    price.ok_or_else(|| format!("{text:?} is not a price: write a number such as 2.5"))
}

pub(super) async fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    args.jobs.append(&mut args.more_jobs);
    if let Some(log) = &args.read_ml_goodput {
        return of_google(log);
    }
    let window = (args.since.map(|When(at)| at), args.until.map(|When(at)| at));
    if let (Some(since), Some(until)) = window
        && since >= until
    {
        output::note("error: --since is not before --until");
        return Ok(ExitCode::from(exit::USAGE));
    }
    let mut accounts = match args.host.as_ref().or(args.socket.as_ref()) {
        Some(socket) => of_server(socket, &args.jobs).await?,
        None if args.ml_goodput => {
            for run in chosen_runs(&args)? {
                for line in run.google_log() {
                    output::print(&format!("{line}\n"))?;
                }
            }
            return Ok(ExitCode::from(exit::OK));
        }
        None => of_journals(&args, window)?,
    };
    accounts.retain(|of| !of.books.times.is_empty());
    if accounts.is_empty() {
        output::note("no job has time to show");
        return Ok(ExitCode::from(exit::UNKNOWN));
    }
    let by = args.by.map(|by| match by {
        By::Job => GroupBy::Job,
        By::Host => GroupBy::Host,
        By::User => GroupBy::User,
        By::Cause => GroupBy::Cause,
    });
    let options = Options { by, price: args.price, window };
    let text = if let Some(form) = args.form.structured() {
        form.document(report::json(&accounts, options))
    } else if args.csv {
        report::csv(&accounts, options)
    } else {
        report::text(&accounts, options)
    };
    output::print(&text)?;
    Ok(ExitCode::from(exit::OK))
}

/// What the calculator of ml-goodput-measurement shows of a log.
fn of_google(log: &Path) -> anyhow::Result<ExitCode> {
    let mut text = String::new();
    let mut file = output::open_input(log).with_context(|| format!("opening {}", log.display()))?;
    file.read_to_string(&mut text).with_context(|| format!("reading {}", log.display()))?;
    let read = google::read(&text).map_err(|error| anyhow::anyhow!("{}: {error}", log.display()))?;
    output::print(&Structured::Json.document(serde_json::to_value(&read)?))?;
    Ok(ExitCode::from(exit::OK))
}

async fn of_server(socket: &Path, jobs: &[String]) -> anyhow::Result<Vec<JobAccount>> {
    let client = Client::connect(socket).await?;
    let known = client.snapshot().await?.jobs;
    let is_meant =
        |job: &Job, name: &String| job.id == *name || job.run == *name || name_of(&job.run) == name;
    if let Some(unknown) = jobs.iter().find(|name| !known.iter().any(|job| is_meant(job, name))) {
        let names: Vec<&str> = known.iter().map(|job| job.id.as_str()).collect();
        bail!("no job {unknown:?} is known there; known: [{}]", names.join(", "));
    }
    let chosen =
        known.into_iter().filter(|job| jobs.is_empty() || jobs.iter().any(|name| is_meant(job, name)));
    chosen
        .map(|job| {
            let books = job.books.clone();
            let mut hosts: Vec<String> = job.ranks.iter().filter_map(|rank| rank.host.clone()).collect();
            hosts.sort_unstable();
            hosts.dedup();
            Ok(JobAccount {
                user: user(job.uid),
                hosts,
                ranks: job.world_size,
                books: books
                    .with_context(|| format!("{}: this server is too old to keep books", socket.display()))?,
                job: job.id,
            })
        })
        .collect()
}

/// The runs that are asked for, with all their launches.
fn chosen_runs(args: &Args) -> anyhow::Result<Vec<Run>> {
    let mut launches = Launches::default();
    let mut jobs = Vec::new();
    match &args.journal {
        Some(dir) => {
            let inside = dir.join("journal");
            launches.read(if inside.is_dir() { &inside } else { dir })?;
            jobs.clone_from(&args.jobs);
        }
        None => {
            let log_dir =
                args.log_dir.clone().unwrap_or_else(|| default_paths::log_dir(&default_paths::environment));
            for name in &args.jobs {
                // A run directory may be anywhere.
                match Path::new(name).join("journal") {
                    of if of.is_dir() => jobs.push(launches.read(&of)?.unwrap_or_else(|| name.clone())),
                    _ => jobs.push(name.clone()),
                }
            }
            launches.read_all(&log_dir)?;
        }
    }
    let mut runs = launches.into_runs();
    if let Some(unknown) = jobs.iter().find(|name| !runs.iter().any(|run| run.is_named(name))) {
        let mut names: Vec<&str> = runs.iter().map(|run| name_of(&run.run)).collect();
        names.dedup();
        bail!("no job {unknown:?} has a journal here; there are: [{}]", names.join(", "));
    }
    runs.retain(|run| jobs.is_empty() || jobs.iter().any(|name| run.is_named(name)));
    Ok(runs)
}

fn of_journals(args: &Args, (since, until): (Option<Wall>, Option<Wall>)) -> anyhow::Result<Vec<JobAccount>> {
    let runs = chosen_runs(args)?;
    let mut accounts = Vec::new();
    for run in &runs {
        // Two runs of one name are told apart by their ids.
        let is_alone = runs.iter().filter(|other| name_of(&other.run) == name_of(&run.run)).count() == 1;
        let kept = run.books((since.unwrap_or(Wall(i64::MIN)), until.unwrap_or(Wall(i64::MAX))));
        let spec = &kept.spec;
        accounts.push(JobAccount {
            job: if is_alone { name_of(&run.run) } else { &run.run }.to_owned(),
            user: if spec.owner.user.is_empty() { user(spec.uid) } else { spec.owner.user.clone() },
            hosts: run.hosts(),
            ranks: spec.world_size,
            books: books(&kept, run.now()),
        });
    }
    Ok(accounts)
}

/// The run of checkpoints without its id.
fn name_of(run: &str) -> &str {
    run.split_once('~').map_or(run, |(name, _)| name)
}

fn user(uid: u32) -> String {
    let found = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid));
    found.ok().flatten().map_or_else(|| uid.to_string(), |user| user.name)
}
