//! How a job's ranks share the model, according to its command line.

/// Sizes of tensor and pipeline parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Ranks that share a layer.
    pub tensor: u32,
    /// The number of pipeline stages.
    pub pipeline: u32,
}

const TENSOR: &[&str] =
    &["tensor-model-parallel-size", "tensor-parallel-size", "parallelism.tensor-parallel-degree", "tp"];
const PIPELINE: &[&str] =
    &["pipeline-model-parallel-size", "pipeline-parallel-size", "parallelism.pipeline-parallel-degree", "pp"];

impl Layout {
    /// Reads the options of Megatron-LM, torchtitan and similar programs. The default is 1.
    pub fn of_command(command: &[String]) -> Layout {
        Layout { tensor: option(command, TENSOR), pipeline: option(command, PIPELINE) }
    }

    /// The stage of a rank. `None` if there is only one stage, or if the sizes do not fit the job. Stages are the
    /// outermost dimension of the rank order, as in Megatron-LM.
    pub fn stage(self, rank: u32, world_size: u32) -> Option<u32> {
        let fits = self.pipeline > 1 && world_size.is_multiple_of(self.pipeline.max(1));
        fits.then(|| rank / (world_size / self.pipeline).max(1))
    }
}

fn option(command: &[String], names: &[&str]) -> u32 {
    let is_named = |word: &str| {
        let word = word.trim_start_matches('-').replace('_', "-");
        names.contains(&word.as_str())
    };
    let value = command.iter().enumerate().find_map(|(at, word)| match word.split_once('=') {
        Some((name, value)) if name.starts_with("--") && is_named(name) => value.parse().ok(),
        _ if word.starts_with("--") && is_named(word) => command.get(at + 1)?.parse().ok(),
        _ => None,
    });
    value.filter(|size| *size > 0).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(command: &str) -> Layout {
        Layout::of_command(&command.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn the_options_of_frameworks_are_read() {
        let megatron = layout("pretrain.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2");
        assert_eq!(megatron, Layout { tensor: 4, pipeline: 2 });
        assert_eq!(
            (megatron.stage(0, 16), megatron.stage(7, 16), megatron.stage(8, 16)),
            (Some(0), Some(0), Some(1))
        );
        let titan = layout("train.py --parallelism.pipeline_parallel_degree=4");
        assert_eq!(titan, Layout { tensor: 1, pipeline: 4 });
    }

    #[test]
    fn missing_or_unfitting_options_mean_one_stage() {
        assert_eq!(layout("train.py --pp many").stage(3, 8), None);
        assert_eq!(layout("train.py --pp 0 --tp=x"), Layout { tensor: 1, pipeline: 1 });
        assert_eq!(layout("train.py --pp 3").stage(3, 8), None);
    }
}
