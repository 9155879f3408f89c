//! `mainstay ckpt`: where checkpoints are stored, whether they are whole, and how to restore them.

mod bucket;
mod files;
mod show;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use mainstay_checkpoint::lineage;
use mainstay_proto::v1::restore_checkpoint_response::Message;
use mainstay_proto::v1::{ListCheckpointsResponse, RestoreCheckpointResponse};
use serde_json::json;

use mainstay_launcher::agent_link::lent_files::LentFiles;

use super::client::Client;
use super::find::{Ask, find};
use super::output::Form;
use super::{exit, output};

/// Show, verify, fetch and delete checkpoints, here and at peers.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// List steps: whole or not, how old, on how many hosts
    Ls(Ls),
    /// Compare every byte in a checkpoint directory with its manifests
    Verify(Directory),
    /// Show where the shards of a step are stored
    Show(Show),
    /// Bring the newest whole step of a run into a directory, from peers where it is not here
    Pull(Pull),
    /// Replicate a directory's steps to peers and wait for the newest whole step
    Push(Push),
    /// Delete all copies of a step, here and at peers
    Rm(Rm),
    /// Delete replicas on this host that no rule keeps
    Gc(Ask),
}

/// Options of a list.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay ckpt ls                                          all steps that the agent and its peers know
  mainstay ckpt ls --dir /nvme/ckpt                         a directory, without an agent
  mainstay ckpt ls --dir s3://bucket/prefix                 durable storage, without an agent
  mainstay ckpt ls --json | jq '.steps[] | select(.whole)'

Exit status: 0 a whole step is there, 1 there are steps but none is whole, 3 there is none or no agent answers,
64 the command line was not understood.")]
struct Ls {
    #[command(flatten)]
    ask: Ask,
    /// Look into this checkpoint directory, or into the durable storage of this URL, and ask no agent
    #[arg(long, value_name = "DIRECTORY|URL")]
    dir: Option<PathBuf>,
    /// Only steps of this run
    #[arg(long, value_name = "ID")]
    run: Option<String>,
}

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: 0 all bytes are as they were sealed, 2 something is damaged, 3 there is nothing."
)]
struct Directory {
    /// The checkpoint directory, or the URL of durable storage
    directory: PathBuf,
    /// In durable storage: only steps of this run
    #[arg(long, value_name = "ID")]
    run: Option<String>,
    #[command(flatten)]
    form: Form,
}

#[derive(Debug, clap::Args)]
struct Show {
    #[command(flatten)]
    ask: Ask,
    /// The step
    step: u64,
    /// Run of the step, if several runs have it
    #[arg(long, value_name = "ID")]
    run: Option<String>,
}

#[derive(Debug, clap::Args)]
struct Pull {
    #[command(flatten)]
    ask: Ask,
    /// The run id of the job (--rdzv-id of mainstay run)
    run: String,
    /// Destination directory; receives plain files, readable without Mainstay
    directory: PathBuf,
    /// Only the shards of these ranks
    #[arg(long, value_name = "RANK", value_delimiter = ',')]
    ranks: Vec<u32>,
    /// From this durable storage, and ask no agent
    #[arg(long, value_name = "URL")]
    from: Option<String>,
}

#[derive(Debug, clap::Args)]
struct Push {
    #[command(flatten)]
    ask: Ask,
    /// The run id of the job
    run: String,
    /// The checkpoint directory
    directory: PathBuf,
    /// How many seconds to wait
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    wait: u64,
    /// Into this durable storage, now, and ask no agent
    #[arg(long, value_name = "URL")]
    to: Option<String>,
}

#[derive(Debug, clap::Args)]
struct Rm {
    #[command(flatten)]
    ask: Ask,
    /// The run id of the job
    run: String,
    /// The step
    step: u64,
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Ls(Ls { dir: Some(directory), ask, run }) if bucket::is_url(&directory) => {
            aside(move || bucket::list(&directory, run.as_deref(), ask.form)).await
        }
        Command::Ls(Ls { dir: Some(directory), ask, run }) => {
            files::list(&directory, run.as_deref(), ask.form)
        }
        Command::Ls(Ls { dir: None, ask, run }) => list(&ask, run).await,
        Command::Verify(Directory { directory, run, form }) if bucket::is_url(&directory) => {
            aside(move || bucket::verify(&directory, run.as_deref(), form)).await
        }
        Command::Verify(Directory { directory, form, .. }) => files::verify(&directory, form),
        Command::Show(args) => show_step(args).await,
        Command::Pull(Pull { from: Some(url), run, directory, ranks, ask }) => {
            aside(move || bucket::pull(&url, &run, &directory, &ranks, ask.form)).await
        }
        Command::Pull(args) => pull(args).await,
        Command::Push(Push { to: Some(url), run, directory, ask, .. }) => {
            aside(move || bucket::push(&url, &run, &directory, ask.form)).await
        }
        Command::Push(args) => push(args).await,
        Command::Rm(args) => {
            let client = connect(&args.ask).await?;
            let copies = client.remove_checkpoint(args.run, args.step).await?;
            print_result(args.ask.form, json!({"copies": copies}), &format!("{copies} copies deleted"))
        }
        Command::Gc(ask) => {
            let replicas = connect(&ask).await?.collect_checkpoints().await?;
            print_result(ask.form, json!({"replicas": replicas}), &format!("{replicas} replica(s) deleted"))
        }
    }
}

/// Runs durable storage work on its own thread: it has a separate runtime, which must not be nested in this one.
async fn aside(work: impl FnOnce() -> anyhow::Result<ExitCode> + Send + 'static) -> anyhow::Result<ExitCode> {
    tokio::task::spawn_blocking(work).await?
}

fn print_result(form: Form, value: serde_json::Value, text: &str) -> anyhow::Result<ExitCode> {
    output::print(&match form.structured() {
        Some(form) => form.document(value),
        None => format!("{text}\n"),
    })?;
    Ok(ExitCode::from(exit::OK))
}

/// A connection to the agent: the first socket that answers.
async fn connect(ask: &Ask) -> anyhow::Result<Client> {
    let found = find(ask.socket.as_deref());
    let mut last = None;
    for place in found.places.iter().filter(|place| place.job.is_none()) {
        match Client::connect(&place.socket).await {
            Ok(client) => return Ok(client),
            Err(error) => last = Some(error),
        }
    }
    match last {
        Some(error) => Err(error.into()),
        None => anyhow::bail!("no agent: looked at {}; --dir looks without one", found.looked_at.join(", ")),
    }
}

async fn list(ask: &Ask, run: Option<String>) -> anyhow::Result<ExitCode> {
    let answer = connect(ask).await?.list_checkpoints(run, true).await?;
    if let Some(form) = ask.form.structured() {
        output::print(&form.document(show::as_json(&answer)))?;
    } else {
        output::print(&show::table(&answer))?;
    }
    Ok(ExitCode::from(weigh(answer.steps.iter().map(|step| step.whole))))
}

/// The exit status for steps, by whether each is whole.
fn weigh(whole: impl Iterator<Item = bool>) -> u8 {
    match whole.max() {
        Some(true) => exit::OK,
        Some(false) => exit::DEGRADED,
        None => exit::UNKNOWN,
    }
}

async fn show_step(args: Show) -> anyhow::Result<ExitCode> {
    let mut answer = connect(&args.ask).await?.list_checkpoints(args.run, true).await?;
    answer.steps.retain(|step| step.step == args.step);
    if let Some(form) = args.ask.form.structured() {
        output::print(&form.document(show::as_json(&answer)))?;
    } else {
        output::print(&answer.steps.iter().map(show::copies).collect::<String>())?;
    }
    Ok(ExitCode::from(weigh(answer.steps.iter().map(|step| step.whole))))
}

async fn pull(args: Pull) -> anyhow::Result<ExitCode> {
    let directory = std::path::absolute(&args.directory)?;
    let client = connect(&args.ask).await?;
    let known = client.list_checkpoints(Some(args.run.clone()), true).await?;
    let run = one_of(&args.run, known.steps.iter().filter(|step| step.whole).map(|step| &*step.run))?;
    let mut messages =
        client.restore_checkpoint(run.clone(), &directory, args.ranks.clone(), String::new()).await?;
    let files = LentFiles::new(&directory);
    loop {
        let message = match messages.message().await {
            Ok(Some(RestoreCheckpointResponse { message: Some(message) })) => message,
            Ok(_) => anyhow::bail!("the agent ended before it was done"),
            Err(status) => anyhow::bail!("{}", output::clean(status.message())),
        };
        match message {
            Message::Progress(at) if at.files_wanted > 0 => {
                // The agent waits for the files, and reports that none arrived.
                if let Err(error) = files.lend(client.socket(), at).await {
                    output::note(&output::clean(&format!("no files can be lent to the agent: {error}")));
                }
            }
            Message::Progress(at) => output::note(&show::progress(&at)),
            Message::Result(mut result) => {
                let settled = files.settle(std::mem::take(&mut result.lent)).await;
                settled.context("putting the restored shards in their places")?;
                if let Some(request) = result.put_back.take() {
                    let token = request.token.clone();
                    // The directory is watched, for a kind of trainer that the agent knows.
                    let done = files.put_back("auto", result.step, request).await;
                    let lines = done.context("putting the restored files in their places")?;
                    lines.iter().for_each(|line| output::note(&output::clean(line)));
                    let ranks = args.ranks.clone();
                    messages = client.restore_checkpoint(run.clone(), &directory, ranks, token).await?;
                    continue;
                }
                let status = if result.step.is_some() { exit::OK } else { exit::UNKNOWN };
                print_result(
                    args.ask.form,
                    show::result_json(&result, &directory),
                    &show::result(&result, &directory),
                )?;
                return Ok(ExitCode::from(status));
            }
        }
    }
}

async fn push(args: Push) -> anyhow::Result<ExitCode> {
    let directory = std::path::absolute(&args.directory)?;
    let client = connect(&args.ask).await?;
    let (enabled, problem) = client.watch_checkpoints(args.run.clone(), &directory).await?;
    if !problem.is_empty() {
        output::note(&output::clean(&problem));
    }
    if !enabled {
        anyhow::bail!(
            "this agent keeps no replicas: neither checkpoint.listen nor checkpoint.durable is set in its configuration"
        );
    }
    let until = std::time::Instant::now() + Duration::from_secs(args.wait);
    loop {
        let answer = client.list_checkpoints(Some(args.run.clone()), true).await?;
        if let Some(step) = answer.steps.iter().find(|step| step.whole)
            && step.least_copies > answer.redundancy
        {
            let value = json!({"step": step.step, "copies": step.least_copies});
            return print_result(
                args.ask.form,
                value,
                &format!("step {} survives until {} hosts are lost", step.step, step.least_copies),
            );
        }
        if std::time::Instant::now() >= until {
            output::note(&why_not(&answer, &problem));
            return Ok(ExitCode::from(exit::DEGRADED));
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// The run that a user means by a name: the only one with that name, with its id.
///
/// # Errors
/// Several runs have the name.
fn one_of<'a>(name: &str, runs: impl Iterator<Item = &'a str>) -> anyhow::Result<String> {
    let of_launch = |run: &'a str| run.split_once('@').map_or(run, |(run, _)| run);
    let runs: BTreeSet<&str> = runs.map(of_launch).filter(|run| lineage::is_asked(run, name)).collect();
    match runs.len() {
        0 => Ok(name.to_owned()),
        1 => Ok(runs.into_iter().collect()),
        many => {
            let runs: Vec<&str> = runs.into_iter().collect();
            anyhow::bail!("{many} runs are named {name}: name one of {}", output::clean(&runs.join(", ")))
        }
    }
}

/// Why the newest step has too few copies, as far as known.
fn why_not(answer: &ListCheckpointsResponse, problem: &str) -> String {
    let peers =
        answer.peers.iter().filter_map(|peer| Some(format!("{}: {}", peer.name, peer.error.as_ref()?)));
    let peers: Vec<String> = peers.collect();
    let known = match (problem, peers.is_empty()) {
        ("", true) => "no peer reports an error".to_owned(),
        ("", false) => peers.join("; "),
        (problem, _) => problem.to_owned(),
    };
    format!("no whole step has {} copies yet; {}", answer.redundancy + 1, output::clean(&known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_the_only_run_that_has_it() {
        let runs = ["train~1@8.f", "train~1@9.f", "train~2", "else~3"];
        assert_eq!(one_of("else", runs.into_iter()).expect("one"), "else~3");
        assert_eq!(one_of("train~1", runs.into_iter()).expect("one"), "train~1");
        assert_eq!(one_of("new", runs.into_iter()).expect("none"), "new");
        let message = one_of("train", runs.into_iter()).expect_err("two").to_string();
        assert!(message.contains("train~1, train~2"), "{message}");
    }

    #[test]
    fn the_status_is_that_of_the_best_step() {
        assert_eq!(weigh([false, true].into_iter()), exit::OK);
        assert_eq!(weigh([false].into_iter()), exit::DEGRADED);
        assert_eq!(weigh(std::iter::empty()), exit::UNKNOWN);
    }
}
