//! The last steps of all ranks in flat vectors: about 220 bytes per rank.
//!
//! Each step writes one row. In addition to the scores it keeps, per rank, sums of the last 8, 16, 32, 64 and 512
//! scores in units of the noise, clipped. A step adds the new score and subtracts the old one, so its cost does not
//! depend on the horizon.

/// The number of rows that are kept individually.
pub const ROWS: usize = 64;

/// The spans over which scores are summed.
pub const HORIZONS: [usize; 4] = [8, 16, 32, ROWS];

/// The number of blocks of [`ROWS`] rows of which only the sum is kept.
const BLOCKS: usize = 7;

/// One unit of a stored score: a quarter of a thousandth.
const SCORE_UNIT: f32 = 1.0 / 4096.0;

/// The stored form of an unknown score.
const UNKNOWN: i16 = i16::MIN;

/// Units of a clipped score per standard deviation.
pub const CLIP_UNITS: f32 = 31.0;

/// Scores count at most this many standard deviations: an outlier is not persistence.
const CLIP: f32 = 4.0;

/// The last steps of all ranks.
#[derive(Clone, Debug)]
pub struct History {
    ranks: usize,
    /// How many steps were seen.
    seen: usize,
    scores: Vec<i16>,
    clipped: Vec<i8>,
    sums: [Vec<i16>; HORIZONS.len()],
    blocks: Vec<i16>,
    long: Vec<i32>,
    steps: [u64; ROWS],
}

impl History {
    /// Room for this many ranks.
    pub fn new(ranks: usize) -> History {
        History {
            ranks,
            seen: 0,
            scores: vec![UNKNOWN; ranks * ROWS],
            clipped: vec![0; ranks * ROWS],
            sums: std::array::from_fn(|_| vec![0; ranks]),
            blocks: vec![0; ranks * BLOCKS],
            long: vec![0; ranks],
            steps: [0; ROWS],
        }
    }

    /// Adds a step: each rank's score, and the noise of scores.
    pub fn push(&mut self, step: u64, scores: &[f32], noise: f32) {
        let row = self.seen % ROWS;
        if row == 0 && self.seen > 0 {
            self.fold_block();
        }
        self.steps[row] = step;
        let at = row * self.ranks..(row + 1) * self.ranks;
        let scale = CLIP_UNITS / noise;
        let bound = CLIP * CLIP_UNITS;
        for (kept, score) in self.scores[at.clone()].iter_mut().zip(scores) {
            *kept =
                if score.is_nan() { UNKNOWN } else { (score / SCORE_UNIT).clamp(-32_000.0, 32_000.0) as i16 };
        }
        // Each horizon's oldest row is subtracted before the new one overwrites that of the longest.
        for (horizon, sums) in HORIZONS.iter().zip(&mut self.sums) {
            if self.seen >= *horizon {
                let oldest = (self.seen - horizon) % ROWS * self.ranks;
                for (sum, old) in sums.iter_mut().zip(&self.clipped[oldest..oldest + self.ranks]) {
                    *sum -= i16::from(*old);
                }
            }
        }
        for (clipped, score) in self.clipped[at.clone()].iter_mut().zip(scores) {
            // NaN becomes 0: a lost report is neutral.
            *clipped = (score * scale).clamp(-bound, bound) as i8;
        }
        for sums in &mut self.sums {
            for (sum, new) in sums.iter_mut().zip(&self.clipped[at.clone()]) {
                *sum += i16::from(*new);
            }
        }
        self.seen += 1;
    }

    /// Moves the last [`ROWS`] rows into a block of the long memory.
    fn fold_block(&mut self) {
        let block = (self.seen / ROWS - 1) % BLOCKS * self.ranks;
        let kept = &mut self.blocks[block..block + self.ranks];
        let newest = &self.sums[HORIZONS.len() - 1];
        for ((long, kept), sum) in self.long.iter_mut().zip(kept).zip(newest) {
            *long += i32::from(*sum) - i32::from(*kept);
            *kept = *sum;
        }
    }

    /// The stored scores of all ranks this many steps before the last. `None` if not seen or no longer kept.
    pub fn row(&self, ago: usize) -> Option<&[i16]> {
        if ago >= self.seen.min(ROWS) {
            return None;
        }
        let row = (self.seen - 1 - ago) % ROWS;
        self.scores.get(row * self.ranks..(row + 1) * self.ranks)
    }

    /// The difference of two stored scores. `None` if one is unknown.
    pub fn difference(one: i16, other: i16) -> Option<f32> {
        (one != UNKNOWN && other != UNKNOWN).then(|| f32::from(one.saturating_sub(other)) * SCORE_UNIT)
    }

    /// How many steps were seen.
    pub fn seen(&self) -> usize {
        self.seen
    }

    /// The sums of clipped scores over the horizon of this index, and how many steps they cover.
    pub fn sums(&self, horizon: usize) -> (&[i16], usize) {
        (&self.sums[horizon], HORIZONS[horizon].min(self.seen))
    }

    /// The sums of clipped scores over the long memory, and how many steps they cover.
    pub fn long(&self) -> (&[i32], usize) {
        (&self.long, (self.seen.saturating_sub(1) / ROWS).min(BLOCKS) * ROWS)
    }

    /// The last `steps` known scores of a rank, oldest first, each with its step.
    pub fn last(&self, rank: u32, steps: usize) -> impl Iterator<Item = (u64, f32)> + '_ {
        let steps = steps.min(ROWS).min(self.seen);
        (self.seen - steps..self.seen).filter_map(move |at| {
            let row = at % ROWS;
            let kept = self.scores[row * self.ranks + rank as usize];
            (kept != UNKNOWN).then(|| (self.steps[row], f32::from(kept) * SCORE_UNIT))
        })
    }

    /// The known scores of a rank, each with the index of its row. The oldest row is 0.
    pub fn last_rows(&self, rank: u32) -> impl Iterator<Item = (usize, f32)> + '_ {
        let rows = ROWS.min(self.seen);
        let first = self.seen - rows;
        (0..rows).filter_map(move |row| {
            let kept = self.scores[(first + row) % ROWS * self.ranks + rank as usize];
            (kept != UNKNOWN).then(|| (row, f32::from(kept) * SCORE_UNIT))
        })
    }

    /// The oldest step that is kept individually.
    pub fn oldest_step(&self) -> u64 {
        if self.seen <= ROWS { self.steps[0] } else { self.steps[self.seen % ROWS] }
    }

    /// The memory used, in bytes.
    pub fn bytes(&self) -> usize {
        self.ranks * (ROWS * 3 + HORIZONS.len() * 2 + BLOCKS * 2 + 4)
    }
}
