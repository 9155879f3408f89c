//! Random numbers that are equal for the same seed on every machine.

/// A generator (xoshiro256++, seeded by splitmix64).
#[derive(Clone, Debug)]
pub struct Random {
    state: [u64; 4],
}

impl Random {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Random {
        let mut at = seed;
        let state = std::array::from_fn(|_| {
            at = at.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (at ^ (at >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        });
        Random { state }
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        let [a, b, c, d] = self.state;
        let out = a.wrapping_add(d).rotate_left(23).wrapping_add(a);
        let (c, d) = (c ^ a, d ^ b);
        self.state = [a ^ d, b ^ c, c ^ (b << 17), d.rotate_left(45)];
        out
    }

    /// Uniformly distributed in [0, 1).
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1_u64 << 24) as f32
    }

    /// Uniformly distributed in [0, `below`); 0 if `below` is 0.
    pub fn below(&mut self, below: usize) -> usize {
        ((u128::from(self.bits()) * below as u128) >> 64) as usize
    }

    /// Whether an event of this probability occurs.
    pub fn happens(&mut self, probability: f32) -> bool {
        self.unit() < probability
    }

    /// Two independent values of the standard normal distribution.
    pub fn normals(&mut self) -> (f32, f32) {
        // 1 - u is above 0, so that its logarithm is finite.
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        let (sine, cosine) = (std::f32::consts::TAU * self.unit()).sin_cos();
        (radius * cosine, radius * sine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_normally_distributed_numbers() {
        let (mut one, mut two) = (Random::new(7), Random::new(7));
        assert!((0..100).all(|_| one.bits() == two.bits()));
        assert_ne!(Random::new(8).bits(), Random::new(7).bits());
        let values: Vec<f32> = (0..50_000)
            .flat_map(|_| {
                let (a, b) = one.normals();
                [a, b]
            })
            .collect();
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / values.len() as f32;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
        assert!((0..1000).all(|_| one.below(3) < 3) && one.below(0) == 0);
    }
}
