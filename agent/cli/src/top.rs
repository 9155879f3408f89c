//! `mainstay top`: what `status`, `ranks` and `gpus` show, as a screen that follows the host and takes keys.

mod screen;

#[cfg(test)]
mod tests;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use mainstay_proto::v1::Device;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use self::screen::{SILENCE_FOR, Top, Wish};
use super::answer::ServerReply;
use super::client::Client;
use super::find::{Server, find};
use super::output::{self, Paint};
use super::status::ask_all;
use super::{exit, explain, gpus, order, stacks};

/// How often the servers are asked.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

/// Follow the host, its jobs and their ranks on one screen; explain, take stacks, silence and restart by a key
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay top                         everything that answers on this host
  mainstay top --host node-17:17130    the agent of another host

Keys: arrows select a job or a component; Enter explains it, t takes the stacks of the job's ranks, d shows the
devices, s silences the component for an hour, r restarts the job (asked twice), q quits.
Exit status: 0 quit, 3 the terminal was lost, 64 the output is no terminal.")]
pub(super) struct Args {
    #[command(flatten)]
    server: Server,
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    if !(io::stdout().is_terminal() && io::stdin().is_terminal()) {
        output::note("error: top needs a terminal; `mainstay status` and `mainstay ranks` print once");
        return Ok(ExitCode::from(exit::USAGE));
    }
    let mut terminal = ratatui::try_init().context("preparing the terminal")?;
    let result = follow(&mut terminal, &args.server).await;
    ratatui::restore();
    result.map(|()| ExitCode::SUCCESS)
}

/// What a key asked for, when it is done.
enum Done {
    /// A text to read, with its title.
    Text(String, String),
    /// One line.
    Note(String),
}

async fn follow(terminal: &mut DefaultTerminal, server: &Server) -> anyhow::Result<()> {
    let mut top = Top::new(Paint::for_stdout());
    let mut events = terminal_events();
    let (mut asking, mut acting) = (JoinSet::new(), JoinSet::new());
    let (mut terminated, mut hung_up) = (signal(SignalKind::terminate())?, signal(SignalKind::hangup())?);
    let mut refresh = tokio::time::interval(REFRESH_INTERVAL);
    refresh.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        terminal.draw(|frame| top.draw(frame.area(), frame.buffer_mut())).context("drawing")?;
        tokio::select! {
            _ = refresh.tick(), if asking.is_empty() => {
                asking.spawn(ask(server.clone()));
            }
            Some(answered) = asking.join_next() => {
                let (answers, devices) = answered.context("asking the servers")?;
                top.take(answers, devices);
            }
            Some(done) = acting.join_next() => match done.context("carrying out an order")? {
                Done::Text(title, text) => top.read(&title, &text),
                Done::Note(note) => top.note(&note),
            },
            event = events.recv() => match event {
                Some(Event::Key(key)) if key.kind != KeyEventKind::Release => match top.key(key) {
                    Some(Wish::Quit) => return Ok(()),
                    Some(wish) => {
                        acting.spawn(act(server.clone(), wish));
                    }
                    None => {}
                },
                // A new size is drawn at once.
                Some(_) => {}
                None => anyhow::bail!("the terminal is gone"),
            },
            _ = terminated.recv() => return Ok(()),
            _ = hung_up.recv() => return Ok(()),
        }
    }
}

/// Keys and new sizes, from a thread of their own: reading a terminal blocks.
fn terminal_events() -> mpsc::UnboundedReceiver<Event> {
    let (sender, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.send(event).is_err() {
                return;
            }
        }
    });
    receiver
}

async fn ask(server: Server) -> (Vec<ServerReply>, Vec<Device>) {
    let answers = ask_all(find(server.named()).places).await;
    let mut devices = Vec::new();
    // Launchers have none, and earlier servers do not know the question.
    for answer in answers.iter().filter(|answer| answer.place.job.is_none() && answer.result.is_ok()) {
        if let Ok(client) = Client::connect(&answer.place.socket).await
            && let Ok(answer) = client.devices().await
        {
            devices.extend(answer.devices);
        }
    }
    (answers, devices)
}

async fn act(server: Server, wish: Wish) -> Done {
    let failed = |error: anyhow::Error| Done::Note(format!("error: {}", output::in_full(&error)));
    match wish {
        Wish::Quit => Done::Note(String::new()),
        Wish::Explain(what) => match explain::text(server, &what).await {
            Ok(Some(text)) => Done::Text(what, text),
            Ok(None) => Done::Note(format!("{what}: there is nothing to explain")),
            Err(error) => failed(error),
        },
        Wish::Stacks { host, job } => {
            let title = format!("stacks of job {}", job.id);
            match tokio::task::spawn_blocking(move || stacks::text(&host, &job)).await {
                Ok(Ok(text)) => Done::Text(title, text),
                Ok(Err(error)) => failed(error),
                Err(error) => failed(error.into()),
            }
        }
        Wish::Devices(devices) => Done::Text("devices".to_owned(), gpus::render(&devices, Paint::plain())),
        Wish::Silence { at, component, reason } => {
            let silence =
                async { Client::connect(&at).await?.silence(&component, &reason, SILENCE_FOR).await };
            match silence.await {
                Ok(()) => Done::Note(format!("{component}: silenced for 1 h")),
                Err(error) => failed(error.into()),
            }
        }
        Wish::Restart { at, job, reason } => {
            let restart = async { order::launcher(at, Some(&job)).await?.restart_job(&reason).await };
            match restart.await {
                Ok(()) => Done::Note(format!("job {job}: restarting")),
                Err(error) => failed(error.into()),
            }
        }
    }
}
