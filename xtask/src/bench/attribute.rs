//! Attribution: how fast logs are read, how soon 8 ranks with 100 MB have a verdict, and how accurate it is on
//! labelled cases without their source. Compared with NVRx's deterministic stage (its L0) over the same text.

use super::example;
use super::prelude::*;

/// The name of NVRx in these figures: the release that has the stage.
const NVRX: &str = "NVRx 0.7.0 L0";

/// NVRx reads one of the 8 logs, because it takes seconds for each MB that we read in milliseconds.
const PEER_LOG: &str = "rank3.log";

const SPEED: &str = "attribute.mb_per_s";

/// Runs the example of the core, and NVRx if it is available.
pub fn measure(bench: &mut Bench, _: &Bed) {
    let what = "attribute: 100 MB of logs of 8 ranks, and labelled cases";
    let mut speed = None;
    bench.part(&["attribute."], what, || {
        let figures = ours()?;
        speed = figures.iter().find(|figure| figure.id == SPEED).cloned();
        Ok(figures)
    });
    let Some(speed) = speed.filter(|_| !bench.args.no_peers && !bench.args.quick) else { return };
    let progress = crate::progress::Progress::begin();
    bench.part(&[SPEED], &format!("attribute: {NVRX} over the same text"), || {
        let python = python::NVRX_CLIENT.ensure(&progress)?.join("bin/python");
        let logs = tempfile::tempdir_in(paths::cache()?).context("making a folder for logs")?;
        let place = logs.path().display().to_string();
        example("attribute_figures", &["--write-logs", &place])?;
        let (script, log) = (script_path("attribute_nvrx.py"), logs.path().join(PEER_LOG));
        let printed = command::output(&mut cmd!("{python} {script} {log}"))?;
        Ok(vec![speed.beside(NVRX, Some(printed.trim().parse().context("a figure of NVRx")?))])
    });
}

fn ours() -> Result<Vec<Figure>> {
    match labelled_cases() {
        Some(cases) => example("attribute_figures", &[&cases.display().to_string()]),
        None => {
            eprintln!(
                "attribute.dev_domain_cv: left out: no labelled cases (MAINSTAY_LABELLED_CASES names a file)"
            );
            example("attribute_figures", &[])
        }
    }
}

/// The labelled cases next to the project, or those that the environment names.
fn labelled_cases() -> Option<PathBuf> {
    let file = std::env::var_os("MAINSTAY_LABELLED_CASES")
        .map_or_else(|| paths::root().join("../shared/attribution/dev.jsonl"), PathBuf::from);
    file.is_file().then_some(file)
}
