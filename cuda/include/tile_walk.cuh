// The order in which the tiles of a product are taken: kBand of tokens are gone through together, all of them for some rows
// of the weight, then for the next rows, so that L2 keeps their x and each weight is read once a band.
#pragma once

constexpr int kBand = 8;

struct TilePlace {
  int token_tile, row_tile;
};

__device__ __forceinline__ TilePlace tile_at(int number, int token_tiles, int row_tiles) {
  const int first = number / (kBand * row_tiles) * kBand, band = min(kBand, token_tiles - first);
  const int rest = number - first * row_tiles;
  return {first + rest % band, rest / band};
}
