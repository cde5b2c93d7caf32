// What the pages of `assigner report` use of Apache ECharts: two kinds of series, and no more of it than they need.
import { getInstanceByDom, init, use, version } from "echarts/core";
import { CustomChart, LineChart } from "echarts/charts";
import { DataZoomInsideComponent, DataZoomSliderComponent, GridComponent, TooltipComponent } from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";

use([
  CustomChart, LineChart, GridComponent, TooltipComponent, DataZoomInsideComponent, DataZoomSliderComponent,
  CanvasRenderer,
]);

export { getInstanceByDom, init, version };
